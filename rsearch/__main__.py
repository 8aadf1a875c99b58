"""Run a command of the package: rsearch COMMAND ..., or python -m rsearch COMMAND ...

`rsearch COMMAND --help` lists what a command takes; each is also a module of its own,
python -m rsearch.COMMAND.
"""

import runpy
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train and evaluate the stages of a recipe, or go on with them",
    "evaluate": "answer held-out questions with a run's policy, and score them",
    "compare": "print one table over several runs",
    "report": "draw runs on one page: curves, results, transcripts",
    "tables": "show a paper's table, and this package's rows beside it",
    "score": "score anybody's predictions",
    "show": "show a run's conversations and the rollouts that it learnt from",
    "replay": "compute an RL step again from its rollouts, and compare",
    "reproduce": "print the commands that made a run",
    "export": "write the trained policy as a Hugging Face model",
    "tool": "answer questions with a trained policy, in a shell",
    "serve": "serve a trained policy over HTTP, to OpenAI's clients too",
    "mcp": "offer a trained policy to other models over MCP",
    "corpus": "write a corpus from public ones, or of articles cut into passages",
    "index": "encode the passages of a corpus and build their ScaNN index",
    "retriever": "serve an index over HTTP, as the published systems ask it",
    "checkpoint": "list, verify or delete the checkpoints of a run",
    "plan": "compile a recipe for machines that are not here: memory, FLOPs, time",
    "bench": "measure speed and memory",
    "fidelity": "write configs/FIDELITY.md: paper, public code and ours, side by side",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, with the others.

    Only the command's own module is imported, so that the list comes at once.

    Returns:
        The exit code, where no command has been run: 0 for the list, 2 for a name that
        is not one. A command ends the process with its own.
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
    runpy.run_module(f"rsearch.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
