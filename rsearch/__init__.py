"""Train and evaluate language models that reason and search, on JAX.

`load_policy`, `run_training`, `run_evaluation`, `load_questions` and the types they use
are imported on first access, so that `import rsearch` is instant.
"""

import importlib
import sys
from typing import Any

_MODULES = {
    "load_policy": "rsearch.api",
    "run_evaluation": "rsearch.evaluation.scoring",
    "load_questions": "rsearch.data.questions",
    **dict.fromkeys(
        ("Passage", "Question", "Rollout", "Tool", "ToolCall", "ToolResult"),
        "rsearch.types",
    ),
}
__all__ = ["run_training", *_MODULES]

# Control-C while `python -m rsearch.COMMAND` imports, which takes seconds, should print
# no traceback. Until Python has located the command's module, argv begins like this;
# the command itself handles Control-C later.
if sys.argv[:1] == ["-m"]:

    def _excepthook(kind, *error, default=sys.excepthook):
        if kind is KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
        else:
            default(kind, *error)

    sys.excepthook = _excepthook


def __getattr__(name: str) -> Any:
    if name == "run_training":
        return importlib.import_module("rsearch.train").main
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
