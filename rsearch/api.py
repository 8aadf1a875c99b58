"""Load a policy from Python; the package's top has all that a program needs.

    import rsearch

    rsearch.run_training({"config": "configs/quickstart.py"}, "runs/quickstart")
    policy = rsearch.load_policy("runs/quickstart")
    rollout = policy.rollout("In which country lies the birthplace of Ida Busch?")
    print(rollout.answer, [passage.title for passage in rollout.passages])
    questions, _ = rsearch.load_questions("dev.jsonl")
    scores, rollouts = rsearch.run_evaluation(policy.rollout, questions)

`run_training` is `rsearch.train.main`, and no function has the name of a command, since
`rsearch.train` and `rsearch.evaluate` are the modules that run these.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable

from ml_collections import ConfigDict

from rsearch.config.recipes import from_json, resolve
from rsearch.runtime.workdir import read_config
from rsearch.serving.exported import read_export
from rsearch.serving.search_tool import SearchTool, tool_config
from rsearch.setup.weights import trained_params


def load_policy(
    directory: str | os.PathLike,
    *,
    config: ConfigDict | dict | str | None = None,
    search: Callable | None = None,
    max_concurrent: int = 8,
    say: Callable[[str], None] = lambda text: None,
) -> SearchTool:
    """Load a policy that answers questions.

    Called with a question it returns a dict, see `rsearch.tool`; its method `rollout`
    returns the conversation. It takes lists of questions, too, and is greedy.

    Args:
        directory: of a run, whose newest weights and configuration are loaded, or of
            what `rsearch.export` has written; with `config` the directory or hub id of
            any Hugging Face model.
        config: of the model: the recipe that it was trained by, such as
            "configs/r_search.py:tiny", or as of `rsearch.config.recipes.resolve`.
        search: a SearchFn in place of the configuration's engine, which is not opened:
            any function (queries) -> for each its Passages, best first.
        max_concurrent: questions answered at once.
        say: called with a line on each thing that takes a while to load.

    Raises:
        ValueError: the directory or the configuration cannot be used.
    """
    common = dict(say=say, search=search)
    if config is None and (exported := read_export(str(directory))):
        config = exported.config
    if config is not None:
        settings = tool_config(
            resolve(config), model=str(directory), max_concurrent=max_concurrent
        )
        return SearchTool(settings, **common)
    try:
        of_run = from_json(read_config(directory))
    except ValueError as error:
        raise ValueError(f"{error}; of a model, config=... names the recipe") from None

    def load_params(setup):
        # The setup's own configuration has no stages, see `tool_config`.
        setup = dataclasses.replace(setup, config=of_run)
        return trained_params(setup, pathlib.Path(directory))[2]

    settings = tool_config(of_run, max_concurrent=max_concurrent, keeps_mesh=True)
    return SearchTool(settings, load_params=load_params, home=directory, **common)
