"""Train and evaluate a recipe's stages: python -m rsearch.train --config=...

The same command on the same workdir resumes where it stopped. From Python:
`rsearch.train.main(config, workdir)`, which `rsearch.run_training` names, too.
"""

import gc

from rsearch.hosts import preemption

if __name__ == "__main__":
    preemption.exit_on_signals()  # now: the imports below take seconds
    gc.disable()  # until they are done: modules are no garbage

import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import xxhash
from ml_collections import ConfigDict

from rsearch.config import recipes
from rsearch.config.stage_plan import (
    START,
    SUMMARY,
    check_plan,
    earlier_stages,
    kind_of,
    stage_configs,
)
from rsearch.data.questions import questions_fingerprint
from rsearch.evaluation.evaluator import Evaluator, run_methods
from rsearch.evaluation.results import read_results, read_transcripts, show_results
from rsearch.hosts import processes
from rsearch.learn.train_state import TrainState
from rsearch.plan.dry_run import HOST_DEVICES, dry_run, with_rows_here
from rsearch.rollout.records import params_fingerprint
from rsearch.runtime import checkpoint, console, files
from rsearch.runtime.identity import recorded_start, refuse_changes
from rsearch.runtime.metrics import read_metrics
from rsearch.runtime.trackers import check_trackers, tracking
from rsearch.runtime.workdir import (
    Workdir,
    check_workdir,
    is_free,
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
    accept: Sequence[str] = (),
    strict: bool = False,
) -> list[dict]:
    """Run the stages of a configuration, or those that remain of them.

    Args:
        config: as of `rsearch.config.recipes.resolve`, such as a dict for sweeps:
            {"config": "configs/quickstart.py", "rl.lr": 3e-4}.
        workdir: directory of this run; made where it is missing.
        accept: inputs and fields that may have changed; see `Workdir`.
        strict: refuse to go on with other code, libraries, variables or devices than
            those of the run's last start, which are noted otherwise.

    Returns:
        The rows of results.json.

    Raises:
        ValueError: the configuration, a file it names or the workdir cannot be used.
    """
    config = recipes.resolve(config)
    # First what can fail: a workdir is bound to its configuration for good.
    workdir = files.expand(workdir)
    check_plan(config)
    processes.on_host0(lambda: check_trackers(config.log.track))
    processes.on_host0(lambda: check_workdir(workdir, config, accept=accept))
    if strict:
        processes.on_host0(lambda: refuse_changes(workdir, config, inputs={}))
    run = _load_run(config, workdir)
    inputs = dict(run.base.inputs)
    for stage, prepared in run.prepared.items():
        inputs |= stage_inputs(stage, prepared, run.base)
    processes.check_same_on_all({"config": recipes.fingerprint(config), **inputs})

    # Other held-out questions end no run: their rows of results are made anew.
    every_input = inputs | {"data.dev": questions_fingerprint(run.base.dev)}
    with (
        open_workdir(workdir, config, inputs=inputs, accept=accept) as home,
        recorded_start(
            home.path, "train", config, inputs=every_input, bound=inputs, strict=strict
        ),
    ):
        devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        has_begun = any((home.path / stage).exists() for stage in config.stages)
        verb = "goes on" if has_begun else "begins"
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
            console.note(f"stopped; the same command goes on in {home.path}")
            raise
        processes.barrier("the results are written")
        home.stop_if_lost()
        if processes.is_host0():
            _report(config, evaluator.dataset, home.path)
        return read_results(home.path)


class PreparedStage(NamedTuple):
    """The objects that a stage starts with, its parameters aside."""

    setup: Setup
    demonstrations: tuple[Rollout, ...]  # of a supervised stage


class Run(NamedTuple):
    """A run as it is loaded before its first stage.

    Attributes:
        base: of the configuration without the stages' overrides; evaluates.
        prepared: the stages that read nothing of earlier stages.
        prepare: prepares one of the others, once the earlier stages have ended.
        finished: names of the stages that have ended.
    """

    base: Setup
    prepared: dict[str, PreparedStage]
    prepare: Callable[[str, ConfigDict], PreparedStage]
    finished: set[str]


def _load_run(config, folder) -> Run:
    """Load everything that can be loaded before the first stage."""
    shared = Shared()
    finished = {
        stage
        for stage, stage_config in stage_configs(config)
        if _has_ended(folder / stage, stage_config)
    }
    base = load_setup(
        config,
        say=console.note,
        only_dev=True,
        home=folder,
        shared=shared,
        is_over=finished == set(config.stages),
        choose_rows=with_rows_here,
    )

    def prepare(stage, stage_config, home=folder) -> PreparedStage:
        setup = load_setup(
            stage_config,
            say=console.note,
            home=home,
            shared=shared,
            is_over=stage in finished,
            choose_rows=with_rows_here,
        )
        if kind_of(stage) != "sft":
            return PreparedStage(setup, ())
        rollouts = replay_demonstrations(
            setup,
            progress=lambda items: console.progress(items, f"{stage}: demonstrations"),
        )
        return PreparedStage(setup, tuple(rollouts))

    # Now rather than after hours of earlier stages: bad files end the run at once.
    prepared = {
        stage: prepare(stage, stage_config, home=None)
        for stage, stage_config in stage_configs(config)
        if not earlier_stages(stage_config) and not _has_curated(folder / stage)
    }
    return Run(base, prepared, prepare, finished)


def run_stages(run: Run, evaluator: Evaluator, home: Workdir) -> None:
    """Run stage after stage; evaluate the policy after each that trains it.

    Args:
        run: from `_load_run`.
        evaluator: of held-out questions.
        home: the run's directory.
    """
    base, config = run.base, run.base.config
    # (model, source of its first weights) -> its weights now. No name but this holds
    # the first ones: they are freed when the first stage has ended.
    weights = {("policy", config.model.source): initial_params(base)}
    if config.eval.at_start:
        _evaluate(config, evaluator, *weights.values(), START, 0, home.path)
    plan = list(stage_configs(config))
    for number, (stage, stage_config) in enumerate(plan):
        needed = {_weights_key(later) for _, later in plan[number:]}
        weights = {key: tree for key, tree in weights.items() if key in needed}
        params = None  # of the last stage: freed before this one's models are loaded
        folder = home.stage(stage)
        # What earlier stages have written is there for all hosts.
        processes.barrier(f"{stage} begins")
        if _has_curated(folder):
            continue

        prepared = run.prepared.get(stage)
        if prepared is None:
            prepared = run.prepare(stage, stage_config)
            home.add_inputs(stage_inputs(stage, prepared, base))
        setup = prepared.setup
        key = _weights_key(stage_config)
        params = weights.get(key)
        if params is None:
            params = initial_params(setup)

        if kind_of(stage) == "curate":
            # Unnamed: a name would hold its model until the run ends.
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
                home.run_id,
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
    """Return a reinforcement stage's objects.

    Args:
        setup: of the stage.
        evaluator: of held-out questions; None where none are asked on the way.
        folder: of the stage.
        name: of the stage.
        run_id: of the run, for its checkpoints.
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
    """Return an RL stage's objects, and its state before a step that a run has taken.

    No index is opened: the stage can learn, and cannot roll out.

    Args:
        config: of the run.
        run: its directory.
        name: of the stage.
        step: that has a checkpoint, or 0.

    Returns:
        The stage, its state, and the weights that it began with where a KL or adapters
        need these, else None.

    Raises:
        ValueError: what the configuration names, or a checkpoint, cannot be used.
    """
    stage_config = dict(stage_configs(config))[name]
    # As if the stage were over: models that are perhaps not asked are loaded lazily.
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
    """Stand for the search of a stage that rolls nothing out."""
    raise AssertionError(f"searched for {queries!r:.60}")


_refuse_search.read = _refuse_search  # of a passage by its id


def _has_curated(folder):
    """Return whether a data stage has ended there: nothing of it is needed again."""
    return kind_of(folder.name) == "curate" and (folder / SUMMARY).exists()


def _has_ended(folder, stage_config):
    """Return whether a stage has a checkpoint of its last step, or its data.

    The checkpoint may yet turn out to be damaged.
    """
    kind = kind_of(folder.name)
    if kind == "curate":
        return _has_curated(folder)
    latest = checkpoint.latest(folder / checkpoint.FOLDER) or 0
    return latest >= stage_config[kind].steps


def stage_inputs(stage: str, prepared: PreparedStage, base: Setup) -> dict[str, str]:
    """Return {name: fingerprint} of what a stage reads.

    The names are the same at every start, whichever stages have ended by then. An input
    that differs from the base's because of the stage's overrides has the stage's name
    before its own.
    """
    inputs = prepared.setup.inputs | _fingerprint(prepared.demonstrations)
    has_overrides = bool(base.config.overrides.get(stage))
    return {
        f"{stage}.{name}"
        if has_overrides and base.inputs.get(name) != value
        else name: value
        for name, value in inputs.items()
    }


def _fingerprint(demonstrations):
    """Return {name: fingerprint} of the demonstrations' tokens; {} without any."""
    digest = xxhash.xxh3_128()
    for rollout in demonstrations:
        for segment in rollout.segments:
            digest.update(segment.token_ids.astype("<i4").tobytes() + b"|")
    return {"sft.demonstrations": digest.hexdigest()} if demonstrations else {}


def _weights_key(stage_config):
    """Return which model a stage trains or asks, and where its weights come from."""
    return stage_config.trains, stage_config.model.source


def _evaluate(config, evaluator, params, stage, step, folder):
    """Evaluate the methods that results.json does not have yet for this policy.

    A row of an earlier step is measured again: the stage may have got more steps, or
    rsearch.evaluate was run before it had ended. So is one of other weights.
    """
    digest = params_fingerprint(params)
    current = {
        row["method"]
        for row in read_results(folder)
        if evaluator.is_current(row, stage=stage, step=step, digest=digest)
    }
    methods = [m for m in config.eval.methods if m not in current]
    run_methods(
        evaluator,
        params,
        stage=stage,
        step=step,
        digest=digest,
        methods=methods,
        folder=folder,
    )


def _report(config, dataset, folder):
    """Print transcripts, the curve and the table, which is seen first."""
    trained = [s for s, c in stage_configs(config) if c.trains == "policy"]
    trained = [s for s in trained if kind_of(s) != "curate"] or [START]
    last = (trained[-1], "protocol", dataset)
    results = read_results(folder)
    # Data stages alone are evaluated nowhere.
    rows = read_transcripts(folder) if results else []
    mine = [r for r in rows if (r["stage"], r["method"], r["dataset"]) == last]
    for row in mine[: config.eval.examples]:
        title = f"{row['id']}: {row['question']} -> {row.get('prediction')}"
        console.block(title, "".join(s["text"] for s in row["segments"]))
    for stage in trained:
        file = folder / stage / "metrics.jsonl"
        values = [row.get("reward") for row in _rows_of(file)]
        rewards = [x for x in values if isinstance(x, int | float) and math.isfinite(x)]
        if rewards:
            title = "reward by step" + ("" if stage == "rl" else f", {stage}")
            low, high = reward_scale(rewards)
            bars = sparkline(rewards, low=low, high=high)
            ends = f"{rewards[0]:.2f} -> {rewards[-1]:.2f}"
            ends += f", lowest {min(rewards):.2f}, highest {max(rewards):.2f}"
            console.block(title, f"{bars}\n{ends}, on a scale of {low:g} to {high:g}")
    if results:
        show_results(results, config)
    console.note(f"results, transcripts and checkpoints: {folder}")
    console.note(f"curves: tensorboard --logdir {folder}")


def _rows_of(file):
    """Return the metrics of a stage; [] where it has none yet."""
    return read_metrics(file) if file.exists() else []


def reward_scale(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a scale: 0 and 1, or the whole numbers around all rewards.

    A scale of the rewards' own range would draw noise as a rise or a collapse.
    """
    return min(0.0, math.floor(min(rewards))), max(1.0, math.ceil(max(rewards)))


def sparkline(
    values: Sequence[float], *, low: float, high: float, width: int = 60
) -> str:
    """Return at most `width` bars, each the mean of its share of the values.

    Args:
        values: within `low` and `high`.
        low, high: what the lowest and the highest bar stand for.
        width: in bars.
    """
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    scale = (len(BARS) - 1) / (high - low)
    return "".join(BARS[round((m - low) * scale)] for m in means)


def command(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    flags = {
        "workdir": (None, "directory of the run (default: below runs/)"),
        "accept": ("", "comma-separated inputs and config.fields allowed to change"),
        "dry_run": (False, "prints stages, budgets and memory, checks them and ends"),
        "devices": (0, "of the dry run; 0 = as few as config.mesh allows"),
        "devices_per_host": (HOST_DEVICES, "of them at most: 4 on most TPU slices"),
        "device_memory_gb": (0.0, "of each, that a dry run must fit; 0 = unchecked"),
        "strict": (False, "refuses other code, libraries or devices than before"),
        **processes.FLAGS,
        "stall_seconds": (12.0, "with several hosts: one silent this long ends all"),
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
    recipe = _without_overrides(argv)
    unchanged, _ = recipes.parse_command_line(recipe, flags=flags)
    host_flags = {n: values[n] for n in (*processes.FLAGS, "stall_seconds")}
    meeting = processes.connected(**host_flags)
    with preemption.handle_signals(config.checkpoint.grace_seconds), meeting:
        workdir = values["workdir"] or default_workdir(unchanged, config)
        accept = tuple(filter(None, values["accept"].split(",")))
        main(config, workdir, accept=accept, strict=values["strict"])
    return 0


def _without_overrides(argv):
    """Return the arguments without --config.a=b, and without --config.a b."""
    others, is_value = [], False
    for word in argv:
        is_field = word.startswith("--config.")
        if not is_field and not is_value:
            others.append(word)
        is_value = is_field and "=" not in word
    return others


def default_workdir(recipe: ConfigDict, config: ConfigDict) -> pathlib.Path:
    """Return runs/<name>, and what was overridden: runs/quickstart-seed=1.

    What a run may change while it goes on is left out, so that the same run is found.
    """
    changed = [
        f"{name}={value}"
        for name, _, value in recipes.diff(recipe, config)
        if not is_free(name)
    ]
    return pathlib.Path("runs") / recipes.run_label(config.name, changed)


if __name__ == "__main__":
    gc.freeze()  # no collection looks at the modules again
    gc.enable()
    preemption.exit_process(recipes.run_command(command))
