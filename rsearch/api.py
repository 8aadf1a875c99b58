"""Load a policy from Python.

The top level of the package has everything that a program needs:

    import rsearch

    rsearch.run_training({"config": "configs/quickstart.py"}, "runs/quickstart")
    policy = rsearch.load_policy("runs/quickstart")
    rollout = policy.rollout("In which country lies the birthplace of Ida Busch?")
    print(rollout.answer, [passage.title for passage in rollout.passages])
    questions, _ = rsearch.load_questions("dev.jsonl")
    scores, rollouts = rsearch.run_evaluation(policy.rollout, questions)

`run_training` is `rsearch.train.main`. No function is named after a command, because
`rsearch.train` and `rsearch.evaluate` are the modules that run these commands.
"""

import dataclasses
import os
from collections.abc import Callable

from ml_collections import ConfigDict

from rsearch.config.recipes import from_json, resolve
from rsearch.runtime.files import expand
from rsearch.runtime.workdir import check_recorded, read_config
from rsearch.serving.exported import read_export
from rsearch.serving.search_tool import SearchTool, tool_config
from rsearch.setup.weights import START, trained_params


def load_policy(
    directory: str | os.PathLike,
    *,
    config: ConfigDict | dict | str | None = None,
    search: Callable | None = None,
    max_concurrent: int = 8,
    log: Callable[[str], None] = lambda text: None,
) -> SearchTool:
    """Load a policy that answers questions.

    Calling the returned policy with a question returns a dict (see `rsearch.tool`); its
    method `rollout` returns the conversation. Both also take a list of questions.
    Decoding is greedy.

    Args:
        directory: a run's directory, from which the newest weights and the
            configuration are loaded, or a directory written by `rsearch.export`. Both
            must search the passages that they were trained with. With `config`: the
            directory or hub id of any Hugging Face model.
        config: the model's configuration: the recipe that it was trained with, such as
            "configs/r_search.py:tiny", or another value that
            `rsearch.config.recipes.resolve` takes.
        search: a SearchFn that replaces the configuration's engine, which is then not
            opened: any function (queries) -> the Passages of each query, best first.
        max_concurrent: number of questions answered concurrently.
        log: called with a line of text for each part that takes a while to load.

    Raises:
        ValueError: the directory or the configuration cannot be used, or no stage of
            the run has a checkpoint yet.
    """
    directory = expand(directory)
    shared_arguments = dict(log=log, search=search)
    retrieval = None
    if config is None and (exported := read_export(str(directory))):
        config = exported.config
        retrieval = exported.retrieval if search is None else None
    if config is not None:
        settings = tool_config(
            resolve(config), model=str(directory), max_concurrent=max_concurrent
        )
        return SearchTool(settings, retrieval=retrieval, **shared_arguments)
    try:
        run_config = from_json(read_config(directory))
    except ValueError as error:
        raise ValueError(f"{error}; a model needs its recipe as config=...") from None

    def load_params(setup):
        names = ("tokenizer",) if search else ("tokenizer", "retrieval")
        check_recorded(
            directory,
            {name: setup.inputs[name] for name in names},
            stage=run_config.stages[-1],
            remedy="restore it; load_policy(..., search=f) searches with f instead",
        )
        # `tool_config` has removed the training stages from the setup's configuration.
        setup = dataclasses.replace(setup, config=run_config)
        stage, _, params = trained_params(setup, directory)
        if stage == START:
            raise ValueError(f"{directory}: no stage has a checkpoint yet")
        return params

    settings = tool_config(run_config, max_concurrent=max_concurrent, keeps_mesh=True)
    return SearchTool(
        settings, load_params=load_params, home=directory, **shared_arguments
    )
