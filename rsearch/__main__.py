"""Run a command of the package: rsearch COMMAND ..., or python -m rsearch COMMAND ...

`rsearch COMMAND --help` lists a command's arguments. Each command is also a module,
python -m rsearch.COMMAND.
"""

import runpy
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train and evaluate the stages of a recipe, or resume a run",
    "evaluate": "answer held-out questions with a run's policy and score the answers",
    "compare": "print one table over several runs",
    "report": "draw runs on one page: curves, results, transcripts",
    "tables": "show a paper's table next to the same rows measured here",
    "score": "score predictions from any system",
    "show": "show a run's conversations and the rollouts it was trained on",
    "replay": "recompute an RL step from its stored rollouts and compare",
    "reproduce": "print the commands that produced a run",
    "export": "write the trained policy as a Hugging Face model",
    "tool": "answer questions with a trained policy in a shell",
    "serve": "serve a trained policy over HTTP, also to OpenAI clients",
    "mcp": "offer a trained policy to other models over MCP",
    "corpus": "write a corpus from public corpora or from articles cut into passages",
    "index": "encode the passages of a corpus and build their ScaNN index",
    "retriever": "serve an index over HTTP with the published systems' protocols",
    "checkpoint": "list, verify or delete the checkpoints of a run",
    "plan": "compile a recipe for absent machines: memory, FLOPs, time",
    "bench": "measure speed and memory",
    "fidelity": "write configs/FIDELITY.md, which compares paper, public code and ours",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument with the remaining arguments.

    Only the command's module is imported, so that listing the commands is instant.

    Returns:
        The exit code if no command was run: 0 for the list of commands, 2 for an
        unknown name. A command ends the process with its own exit code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("--help", "-h"):
        print(
            "usage: rsearch COMMAND ...; rsearch COMMAND --help shows what it takes\n"
        )
        for name, sentence in COMMANDS.items():
            print(f"  {name:<12} {sentence}")
        return 0
    name, *arguments = argv
    if name not in COMMANDS:
        from rsearch.text.spelling import did_you_mean

        hint = did_you_mean(name, list(COMMANDS))
        print(f"error: no command {name!r}{hint}; rsearch lists them", file=sys.stderr)
        return 2
    sys.argv = [f"rsearch {name}", *arguments]
    try:
        runpy.run_module(f"rsearch.{name}", run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # during the command's imports, which take seconds
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
