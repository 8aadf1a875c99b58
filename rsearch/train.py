"""Train and evaluate a recipe's stages: python -m rsearch.train --config=...

The same command with the same workdir resumes an interrupted run. From Python call
`rsearch.train.main(config, workdir)`; `rsearch.run_training` is another name for it.
"""

import gc

from rsearch.hosts import preemption

if __name__ == "__main__":
    preemption.exit_on_signals()  # first, because the imports below take seconds
    gc.disable()  # during the imports, which create many objects but no garbage

import functools
import itertools
import math
import pathlib
import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import xxhash
from ml_collections import ConfigDict

from rsearch.config import recipes
from rsearch.config.stage_plan import (
    START,
    check_plan,
    earlier_stages,
    kind_of,
    stage_configs,
)
from rsearch.data.questions import questions_fingerprint
from rsearch.evaluation.evaluator import Evaluator, run_methods
from rsearch.evaluation.results import read_results, read_transcripts, show_results
from rsearch.hosts import processes
from rsearch.hosts.offload import in_host_memory, on_device
from rsearch.learn.train_state import TrainState
from rsearch.plan.dry_run import HOST_DEVICES, dry_run, with_rows_here
from rsearch.rollout.records import params_fingerprint
from rsearch.runtime import checkpoint, console, files
from rsearch.runtime.identity import recorded_start, refuse_changes
from rsearch.runtime.metrics import read_metrics
from rsearch.runtime.trackers import check_trackers, tracking
from rsearch.runtime.workdir import (
    CONFIG,
    Workdir,
    check_workdir,
    may_differ,
    open_workdir,
    read_run_id,
)
from rsearch.setup import stages as parts
from rsearch.setup.context import Setup
from rsearch.setup.learners import make_trainer, offload_reference
from rsearch.setup.load import Shared, check_local_files, load_setup
from rsearch.setup.rollouts import replay_demonstrations
from rsearch.setup.weights import initial_params, weights_before
from rsearch.stages import rl, sft
from rsearch.stages.curate import run as curate
from rsearch.stages.curate.rolling import DataStage
from rsearch.stages.memory import MemorySet
from rsearch.types import Params, Rollout

BARS = "▁▂▃▄▅▆▇█"


def main(
    config: ConfigDict | dict | str,
    workdir: str | pathlib.Path,
    *,
    accept: Sequence[str] | str = (),
    strict: bool = False,
) -> list[dict]:
    """Run the stages of a configuration that have not finished yet.

    Args:
        config: whatever `rsearch.config.recipes.resolve` accepts, such as a dict for
            sweeps: {"config": "configs/quickstart.py", "rl.lr": 3e-4}.
        workdir: directory of this run; created if it is missing.
        accept: inputs and fields that may have changed, see `Workdir`; a text holds
            several, separated by commas.
        strict: refuse to resume if the code, libraries, environment variables or
            devices differ from those of the run's last start. Without it, a difference
            is only printed.

    Returns:
        The rows of results.json.

    Raises:
        ValueError: the configuration, a file it names or the workdir cannot be used.
    """
    config = recipes.resolve(config)
    if isinstance(accept, str):
        accept = tuple(filter(None, accept.split(",")))
    # Check everything that can fail first: once a workdir is bound to a configuration,
    # it stays bound.
    workdir = files.expand(workdir)
    check_plan(config)

    def check():
        check_trackers(config.log.track)
        check_workdir(workdir, config, accept=accept)
        if not (workdir / CONFIG).exists():  # a run that has begun must go on
            recipes.check_effective(config)
        if strict:
            refuse_changes(workdir, config, inputs={})

    processes.on_host0(check)
    run = _load_run(config, workdir)
    inputs = dict(run.base.inputs)
    for stage, prepared in run.prepared.items():
        inputs |= stage_inputs(stage, prepared, run.base)
    config_fields = recipes.fields({"config": config.to_dict()})
    processes.check_same_on_all(config_fields | inputs)

    # Changed held-out questions do not end a run: only their results are recomputed.
    all_inputs = inputs | {"data.dev": questions_fingerprint(run.base.dev)}
    with (
        open_workdir(workdir, config, inputs=inputs, accept=accept) as home,
        recorded_start(
            home.path, "train", config, inputs=all_inputs, bound=inputs, strict=strict
        ),
    ):
        devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        has_begun = any((home.path / stage).exists() for stage in config.stages)
        verb = "resumes" if has_begun else "begins"
        if processes.num_hosts() > 1:
            devices += f" of {processes.num_hosts()} hosts"
        console.note(f"{config.name} {verb} in {home.path} on {devices}")
        try:
            evaluator = Evaluator(**parts.evaluation_parts(run.base))
            with tracking(
                config.log.track if processes.is_host0() else (),
                home.path,
                stages=config.stages,
                config=config.to_dict(),
            ):
                run_stages(run, evaluator, home)
        except KeyboardInterrupt:
            console.note(f"stopped; the same command resumes it in {home.path}")
            raise
        processes.barrier("the results are written")
        home.stop_if_lost()
        if processes.is_host0():
            _print_report(config, evaluator.dataset, home.path)
        return read_results(home.path)


class PreparedStage(NamedTuple):
    """The objects that a stage starts with, except its parameters."""

    setup: Setup
    demonstrations: tuple[Rollout, ...]  # empty unless the stage is supervised


class Run(NamedTuple):
    """A run as it is loaded before its first stage.

    Attributes:
        base: setup of the configuration without stage overrides, used for evaluation.
        prepared: stages that do not depend on the output of earlier stages.
        prepare: prepares any other stage, once the earlier stages have finished.
        finished: names of the stages that have finished.
    """

    base: Setup
    prepared: dict[str, PreparedStage]
    prepare: Callable[[str, ConfigDict], PreparedStage]
    finished: set[str]


def _load_run(config, folder) -> Run:
    """Load everything that can be loaded before the first stage."""
    finished = {
        stage
        for stage, stage_config in stage_configs(config)
        if _has_ended(folder / stage, stage_config)
    }
    load = functools.partial(
        load_setup, log=console.note, shared=Shared(), choose_rows=with_rows_here
    )
    is_over = finished == set(config.stages)
    later = [c for stage, c in stage_configs(config) if stage not in finished]
    base = load(config, only_dev=True, home=folder, is_over=is_over, later=later)

    def prepare(stage, stage_config, home=folder) -> PreparedStage:
        setup = load(stage_config, home=home, is_over=stage in finished)
        if kind_of(stage) != "sft":
            return PreparedStage(setup, ())
        rollouts = replay_demonstrations(
            setup,
            progress=lambda items: console.progress(items, f"{stage}: demonstrations"),
        )
        return PreparedStage(setup, tuple(rollouts))

    # Prepare these now, so that bad files end the run before hours of earlier stages.
    prepared = {
        stage: prepare(stage, stage_config, home=None)
        for stage, stage_config in stage_configs(config)
        if not earlier_stages(stage_config) and not _has_curated(folder / stage)
    }
    return Run(base, prepared, prepare, finished)


def run_stages(run: Run, evaluator: Evaluator, home: Workdir) -> None:
    """Run the stages in order; evaluate the policy after each stage that trains it."""
    base, config = run.base, run.base.config
    # (model, source of its initial weights) -> its current weights. This dict holds
    # the only reference to the initial weights, so that they can be freed after the
    # first stage.
    weights = {("policy", config.model.source): initial_params(base)}
    if config.eval.at_start:
        _evaluate(config, evaluator, *weights.values(), START, 0, home.path)
    plan = list(stage_configs(config))
    for number, (stage, stage_config) in enumerate(plan):
        needed_keys = {_weights_key(later_config) for _, later_config in plan[number:]}
        weights = {key: tree for key, tree in weights.items() if key in needed_keys}
        params = None  # frees the last stage's weights before this stage loads models
        folder = home.stage(stage)
        # Every host must see the files that earlier stages have written.
        processes.barrier(f"{stage} begins")
        if _has_curated(folder):
            continue

        key = _weights_key(stage_config)
        # This stage may load a teacher, which needs the devices' memory.
        weights = {
            name: on_device(tree) if name == key else in_host_memory(tree)
            for name, tree in weights.items()
        }
        prepared = run.prepared.get(stage)
        if prepared is None:
            prepared = run.prepare(stage, stage_config)
            home.add_inputs(stage_inputs(stage, prepared, base))
        setup = prepared.setup
        params = weights.get(key)
        if params is None:
            params = initial_params(setup)

        if kind_of(stage) == "curate":
            # Not assigned to a variable, which would keep its model until the run ends.
            curate.run(
                DataStage(
                    name=stage, folder=folder, params=params, **parts.data_parts(setup)
                )
            )
            continue
        params = weights[key] = offload_reference(setup, params)
        if kind_of(stage) == "sft":
            stage_parts = sft.SFTStage(
                setup.config,
                folder,
                make_trainer(setup, "sft"),
                prepared.demonstrations,
                name=stage,
                run_id=home.run_id,
            )
            params = sft.run(stage_parts, params)
        else:
            stage_parts = rl_stage(
                setup,
                evaluator,
                folder,
                name=stage,
                run_id=home.run_id,
                is_over=stage in run.finished,
            )
            params = rl.run(stage_parts, params)
        weights[key] = params
        if stage_config.trains == "policy":
            steps = stage_config[kind_of(stage)].steps
            _evaluate(config, evaluator, params, stage, steps, home.path)


def rl_stage(
    setup: Setup,
    evaluator: Evaluator | None,
    folder: pathlib.Path,
    *,
    name: str = "rl",
    run_id: str = "",
    is_over: bool = False,
) -> rl.RLStage:
    """Return the objects that a reinforcement stage works with.

    Args:
        evaluator: evaluates held-out questions during training; None if the stage is
            not going to train.
        run_id: the run's id, stored in its checkpoints.
        is_over: see `load_setup`.
    """
    memory = None
    if setup.config.rl.memorise_coef:
        rewrite = parts.load_rewriter(setup, folder, is_over=is_over)
        memory = MemorySet(rewrite, folder, **parts.memory_settings(setup))
    return rl.RLStage(
        **parts.rl_parts(setup, folder),
        name=name,
        run_id=run_id,
        evaluate=lambda params: evaluator(params, "protocol")[0],
        memory=memory,
    )


def load_step(
    config: ConfigDict, run: pathlib.Path, name: str, step: int
) -> tuple[rl.RLStage, TrainState, Params | None]:
    """Return an RL stage's objects and its state before a given step of a past run.

    The stage can compute updates but cannot roll out, since no index is opened.

    Args:
        step: a step that has a checkpoint, or 0.

    Returns:
        The stage, its state, and its initial weights if a KL term or adapters need
        them, else None.

    Raises:
        ValueError: something that the configuration names, or a checkpoint, cannot be
            used.
    """
    stage_config = dict(stage_configs(config))[name]
    # A stage that is over loads its models lazily, since they may not be needed.
    setup = load_setup(
        stage_config,
        home=run,
        is_over=True,
        search=_refuse_search,
        choose_rows=with_rows_here,
    )
    stage = rl_stage(setup, None, run / name, name=name, is_over=True)
    first_params = None
    if step == 0 or stage_config.rl.kl_coef or stage_config.model.lora_rank:
        initial = functools.partial(initial_params, setup)
        first_params = weights_before(run, name, setup.model.spec, setup.mesh, initial)
        first_params = offload_reference(setup, first_params)
    if step == 0:
        return stage, stage.trainer.fresh_state(first_params), first_params
    state = checkpoint.restore(
        run / name / checkpoint.FOLDER,
        step,
        stage.trainer.state_shapes,
        made_by={"run": read_run_id(run), "stage": name},
    )
    return stage, state, first_params


def _refuse_search(queries):
    """Replace the search of a stage that never rolls out."""
    raise AssertionError(f"searched for {queries!r:.60}")


_refuse_search.read = _refuse_search  # reading a passage by its id is refused too


def _has_curated(folder):
    """Return whether the folder's stage is a data stage that has finished."""
    return kind_of(folder.name) == "curate" and curate.is_finished(folder)


def _has_ended(folder, stage_config):
    """Return whether a stage has a checkpoint of its last step, or its data.

    The checkpoint is not read, so it may still turn out to be damaged.
    """
    kind = kind_of(folder.name)
    if kind == "curate":
        return curate.is_finished(folder)
    latest = checkpoint.latest(folder / checkpoint.FOLDER) or 0
    return latest >= stage_config[kind].steps


def stage_inputs(stage: str, prepared: PreparedStage, base: Setup) -> dict[str, str]:
    """Return {name: fingerprint} of the inputs that a stage reads.

    The names are the same at every start, no matter which stages have finished by then.
    If a stage's overrides make an input differ from the base's, its name is prefixed
    with the stage's name.
    """
    inputs = dict(prepared.setup.inputs)
    if prepared.demonstrations:
        digest = xxhash.xxh3_128()
        for rollout in prepared.demonstrations:
            for segment in rollout.segments:
                digest.update(segment.token_ids.astype("<i4").tobytes() + b"|")
        inputs["sft.demonstrations"] = digest.hexdigest()
    has_overrides = bool(base.config.overrides.get(stage))
    return {
        f"{stage}.{name}"
        if has_overrides and base.inputs.get(name) != value
        else name: value
        for name, value in inputs.items()
    }


def _weights_key(stage_config):
    """Return which model a stage trains or calls, and the source of its weights."""
    return stage_config.trains, stage_config.model.source


def _evaluate(config, evaluator, params, stage, step, folder):
    """Evaluate the methods that results.json does not have yet for this policy.

    A row that belongs to an earlier step or to other weights is measured again: the
    stage may have been extended, or rsearch.evaluate may have run before it finished.
    """
    policy = {"stage": stage, "step": step, "digest": params_fingerprint(params)}
    current = {
        row["method"]
        for row in read_results(folder)
        if row["method"] in config.eval.methods and evaluator.is_current(row, **policy)
    }
    methods = [m for m in config.eval.methods if m not in current]
    run_methods(evaluator, params, **policy, methods=methods, folder=folder)


def _print_report(config, dataset, folder):
    """Print transcripts, the curve and, last so that it stays visible, the table."""
    trained_stages = [s for s, c in stage_configs(config) if c.trains == "policy"]
    trained_stages = [s for s in trained_stages if kind_of(s) != "curate"] or [START]
    last_key = (trained_stages[-1], "protocol", dataset)
    results = read_results(folder)
    # A run that has only data stages is never evaluated.
    rows = read_transcripts(folder) if results else []
    last_rows = [r for r in rows if (r["stage"], r["method"], r["dataset"]) == last_key]
    for row in last_rows[: config.eval.examples]:
        title = f"{row['id']}: {row['question']} -> {row.get('prediction')}"
        console.block(title, "".join(s["text"] for s in row["segments"]))
    for stage in trained_stages:
        file = folder / stage / "metrics.jsonl"
        values = [r.get("reward") for r in read_metrics(file)] if file.exists() else []
        rewards = [x for x in values if isinstance(x, int | float) and math.isfinite(x)]
        if rewards:
            title = "reward by step" + ("" if stage == "rl" else f", {stage}")
            low, high = reward_scale(rewards)
            bars = sparkline(rewards, low=low, high=high)
            span = f"{rewards[0]:.2f} -> {rewards[-1]:.2f}"
            span += f", lowest {min(rewards):.2f}, highest {max(rewards):.2f}"
            console.block(title, f"{bars}\n{span}, on a scale of {low:g} to {high:g}")
    if results:
        show_results(results, config)
    console.note(f"results, transcripts and checkpoints: {folder}")
    console.note(f"curves: tensorboard --logdir {shlex.quote(str(folder))}")


def reward_scale(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a scale: 0 and 1, or the integers that enclose all rewards.

    A scale that covered only the rewards' range would make noise look like a trend.
    """
    return min(0.0, math.floor(min(rewards))), max(1.0, math.ceil(max(rewards)))


def sparkline(
    values: Sequence[float], *, low: float, high: float, width: int = 60
) -> str:
    """Return at most `width` bars, each showing the mean of its share of the values.

    Args:
        values: numbers within [low, high].
        low, high: values of the lowest and the highest bar.
    """
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    scale = (len(BARS) - 1) / (high - low)
    return "".join(BARS[round((m - low) * scale)] for m in means)


def command(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    flags = {
        "workdir": (None, "directory of the run (default: a directory below runs/)"),
        "accept": ("", "comma-separated inputs and config.fields allowed to change"),
        "dry_run": (False, "check and print stages, budgets and memory, then exit"),
        "devices": (0, "devices of a dry run; 0 = as few as config.mesh allows", 0),
        "devices_per_host": (
            HOST_DEVICES,
            "most devices of a host; 4 on most TPU slices",
            1,
        ),
        "device_memory_gb": (0.0, "memory a device has in a dry run; 0 = unchecked", 0),
        "strict": (False, "refuse to resume with other code, libraries or devices"),
        **processes.FLAGS,
        **processes.STALL_FLAG,
    }
    config, values = recipes.parse_command_line(argv, flags=flags)
    if values["print_config"]:
        recipes.print_config(config)
        return 0
    if values["dry_run"]:
        names = "devices", "devices_per_host", "device_memory_gb"
        dry_run(config, **{name: values[name] for name in names})
        check_local_files(config, console.note)
        return 0
    recipes.validate(config)
    host_flags = {n: values[n] for n in (*processes.FLAGS, *processes.STALL_FLAG)}
    connection = processes.connected(**host_flags)
    with preemption.handle_signals(config.checkpoint.grace_seconds), connection:
        workdir = values["workdir"] or default_workdir(
            recipes.load(values["config"]), config
        )
        main(config, workdir, accept=values["accept"], strict=values["strict"])
    return 0


def default_workdir(recipe: ConfigDict, config: ConfigDict) -> pathlib.Path:
    """Return runs/<name> followed by the overrides, such as runs/quickstart-seed=1.

    Overrides that may change when a run resumes are left out, so that the resumed run
    gets the same directory.
    """
    overrides = [
        f"{name}={value}"
        for name, _, value in recipes.diff(recipe, config)
        if not may_differ(name, recipes.fields(config))
    ]
    return pathlib.Path("runs") / recipes.run_label(config.name, overrides)


if __name__ == "__main__":
    gc.freeze()  # excludes the imported modules from every later collection
    gc.enable()
    preemption.exit_process(recipes.run_command(command))
