"""Trains and evaluates a recipe's stages: python -m rsearch.train --config=...

The same command on the same workdir goes on where it stopped. From Python:
`rsearch.train.main(config, workdir)` with `load` and `apply_overrides` of
`rsearch.config.recipes`.
"""

import itertools
import pathlib
import re
from typing import NamedTuple

import jax
import xxhash

from rsearch import setup as build
from rsearch.config import recipes as configuration
from rsearch.config.stage_plan import (
    SUMMARY,
    check_plan,
    earlier_stages,
    kind_of,
    stage_configs,
)
from rsearch.evaluation.evaluator import (
    CHECKPOINTS,
    START,
    Evaluator,
    read_results,
    run_methods,
    show,
)
from rsearch.hosts import preemption, processes
from rsearch.plan.dry_run import HOST_DEVICES, dry_run
from rsearch.runtime import checkpoint, console
from rsearch.runtime.jsonl import read_jsonl
from rsearch.runtime.metrics import read_metrics
from rsearch.runtime.workdir import check_workdir, is_free, open_workdir
from rsearch.stages import rl, sft
from rsearch.stages.curate import run as curate
from rsearch.stages.memory import Memory

MAX_LABEL = 100  # characters of a default workdir before it is cut
BARS = "▁▂▃▄▅▆▇█"


def main(config, workdir, *, accept=()) -> list[dict]:
    """Runs all stages of a configuration, or what is left of them.

    Args:
        config: as `load` and `apply_overrides` return it; or a dict with the
            recipe as "config" and dotted overrides beside it, for sweeps:
            {"config": "configs/quickstart.py", "rl.lr": 3e-4}.
        workdir: directory of this run; made where it is missing.
        accept: inputs and fields that may have changed; see `Workdir`.

    Returns:
        The rows of results.json.

    Raises:
        ValueError: the configuration, a file it names or the workdir cannot be used.
    """
    if isinstance(config, dict):
        overrides = dict(config)
        if "config" not in overrides:
            raise ValueError('a dict of overrides needs the recipe, as "config"')
        recipe = configuration.load(overrides.pop("config"))
        config = configuration.apply_overrides(recipe, overrides)
    # First what can fail: a workdir is bound to its configuration for good.
    check_plan(config)
    processes.on_host0(lambda: check_workdir(workdir, config, accept=accept))
    shared = build.Shared()
    folder = pathlib.Path(workdir)
    over = {s for s, own in stage_configs(config) if _is_over(s, own, folder)}
    base = build.load_setup(
        config,
        say=console.note,
        only_dev=True,
        home=workdir,
        shared=shared,
        is_over=over == set(config.stages),
    )
    ready = {
        stage: _prepare(stage, own, shared, is_over=stage in over)
        for stage, own in stage_configs(config)
        if not earlier_stages(own) and not _has_curated(folder / stage)
    }
    inputs = dict(base.inputs)
    for stage, prepared in ready.items():
        inputs |= _inputs_of(stage, prepared, base)
    processes.check_same_on_all({"config": configuration.fingerprint(config), **inputs})
    with open_workdir(workdir, config, inputs=inputs, accept=accept) as home:
        devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        has_begun = any((home.path / stage).exists() for stage in config.stages)
        again = "goes on" if has_begun else "begins"
        if processes.num_hosts() > 1:
            devices += f" of {processes.num_hosts()} hosts"
        console.note(f"{config.name} {again} in {home.path} on {devices}")
        try:
            evaluator = Evaluator(base)
            _run_stages(base, ready, shared, evaluator, home, over)
        except KeyboardInterrupt:
            console.note(f"stopped; the same command goes on in {home.path}")
            raise
        processes.barrier("the results are written")
        if processes.is_host0():
            _report(config, evaluator.dataset, home.path)
        return read_results(home.path)


class _Prepared(NamedTuple):
    """What a stage starts with, but for parameters."""

    setup: build.Setup
    demonstrations: tuple  # rollouts, of a supervised stage


def _prepare(stage, own, shared, home=None, *, is_over) -> _Prepared:
    """Loads what a stage needs, and replays its demonstrations."""
    setup = build.load_setup(
        own, say=console.note, home=home, shared=shared, is_over=is_over
    )
    if kind_of(stage) != "sft":
        return _Prepared(setup, ())
    rollouts = build.replay_demonstrations(
        setup,
        progress=lambda items: console.progress(items, f"{stage}: demonstrations"),
    )
    return _Prepared(setup, tuple(rollouts))


def _has_curated(folder):
    """Whether a data stage has ended there: nothing of it is needed again."""
    return kind_of(folder.name) == "curate" and (folder / SUMMARY).exists()


def _is_over(stage, own, folder):
    """Whether a stage has a checkpoint of its last step, or its data.

    The checkpoint may yet turn out to be damaged.
    """
    kind = kind_of(stage)
    if kind == "curate":
        return _has_curated(folder / stage)
    return (checkpoint.latest(folder / stage / CHECKPOINTS) or 0) >= own[kind].steps


def _inputs_of(stage, prepared, base):
    """Fingerprints of what a stage reads; its name is before those of its own.

    They have the same names at every start, whichever stages have ended by then: what
    a stage with overrides reads is its own if the run's first setup does not read it.
    """
    own = prepared.setup.inputs | _fingerprint(prepared.demonstrations)
    has_own = bool(base.config.overrides.get(stage))
    return {
        f"{stage}.{name}" if has_own and base.inputs.get(name) != value else name: value
        for name, value in own.items()
    }


def _fingerprint(demonstrations):
    """{name: fingerprint} of the demonstrations' tokens, where there are some."""
    digest = xxhash.xxh3_128()
    for rollout in demonstrations:
        for segment in rollout.segments:
            digest.update(segment.token_ids.astype("<i4").tobytes() + b"|")
    return {"sft.demonstrations": digest.hexdigest()} if demonstrations else {}


def _run_stages(base, ready, shared, evaluator, home, over):
    """Stage after stage; each that trains the policy is evaluated when it has ended."""
    config = base.config
    # Whose weights, and where they come from -> what they have become. No name holds
    # what they began as: that is freed when the first stage has ended.
    trained = {("policy", config.model.source): build.initial_params(base)}
    if config.eval.at_start:
        _evaluate(config, evaluator, *trained.values(), START, 0, home.path)
    plan = list(stage_configs(config))
    for number, (stage, own) in enumerate(plan):
        needed = {_weights_of(later) for _, later in plan[number:]}
        trained = {key: held for key, held in trained.items() if key in needed}
        params = None  # of the last stage: freed before this one's models are loaded
        folder = home.stage(stage)
        processes.barrier(
            f"{stage} begins"
        )  # what earlier stages have written is there
        if _has_curated(folder):
            continue
        prepared = ready.get(stage)
        if prepared is None:
            prepared = _prepare(stage, own, shared, home.path, is_over=stage in over)
            home.add_inputs(_inputs_of(stage, prepared, base))
        setup = prepared.setup
        key = _weights_of(own)
        params = trained.get(key)
        if params is None:
            params = build.initial_params(setup)
        if kind_of(stage) == "curate":
            curate.run(setup, params, folder, stage=stage)
            continue
        params = trained[key] = build.offload_reference(setup, params)
        if kind_of(stage) == "sft":
            params = sft.run(sft_stage(setup, prepared.demonstrations, folder), params)
        else:
            is_over = stage in over
            params = rl.run(
                rl_stage(setup, evaluator, folder, name=stage, is_over=is_over), params
            )
        trained[key] = params
        if own.trains == "policy":
            steps = own[kind_of(stage)].steps
            _evaluate(config, evaluator, params, stage, steps, home.path)


def sft_stage(setup: build.Setup, demonstrations, folder) -> sft.SFTStage:
    """Return a supervised stage's objects."""
    trainer = build.make_trainer(setup, "sft")
    return sft.SFTStage(setup.config, folder, trainer, demonstrations)


def rl_stage(
    setup: build.Setup,
    evaluator: Evaluator | None,
    folder: pathlib.Path,
    *,
    name: str = "rl",
    is_over: bool = False,
) -> rl.RLStage:
    """Return a reinforcement stage's objects.

    Args:
        setup: of the stage.
        evaluator: of held-out questions; None where none are asked on the way.
        folder: of the stage.
        name: of the stage.
        is_over: see `load_setup`.
    """
    memory = None
    if setup.config.rl.memorise_coef:
        rewrite = build.load_rewriter(setup, folder, is_over=is_over)
        memory = Memory(rewrite, folder, **build.memory_settings(setup))
    return rl.RLStage(
        **build.rl_parts(setup, folder),
        name=name,
        evaluate=lambda params: evaluator(params, "protocol")[0],
        memory=memory,
    )


def _weights_of(own):
    """Whose weights a stage trains or asks, and where they come from."""
    return own.trains, own.model.source


def _evaluate(config, evaluator, params, stage, step, folder):
    """Evaluates the methods that results.json does not have yet for this policy.

    A row of an earlier step is measured again: the stage may have got more steps, or
    rsearch.evaluate was run before it had ended.
    """
    have = {
        row["method"]
        for row in read_results(folder)
        if evaluator.is_current(row, stage=stage, step=step)
    }
    methods = [m for m in config.eval.methods if m not in have]
    run_methods(
        evaluator, params, stage=stage, step=step, methods=methods, folder=folder
    )


def _report(config, dataset, folder):
    """Transcripts, the curve and the table, in this order: the last is seen first."""
    trains = [s for s, own in stage_configs(config) if own.trains == "policy"]
    trains = [s for s in trains if kind_of(s) != "curate"] or [START]
    last = (trains[-1], "protocol", dataset)
    rows = read_jsonl(folder / "transcripts.jsonl")
    mine = [r for r in rows if (r["stage"], r["method"], r["dataset"]) == last]
    for row in mine[: config.eval.examples]:
        title = f"{row['id']}: {row['question']} -> {row['prediction']}"
        console.block(title, "".join(s["text"] for s in row["segments"]))
    for stage in trains:
        file = folder / stage / "metrics.jsonl"
        rewards = [row["reward"] for row in _rows_of(file) if "reward" in row]
        if rewards:
            title = "reward by step" + ("" if stage == "rl" else f", {stage}")
            bars = sparkline(rewards)
            console.block(title, f"{bars} {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    show(read_results(folder), config)
    console.note(f"results, transcripts and checkpoints: {folder}")
    console.note(f"curves: tensorboard --logdir {folder}")


def _rows_of(file):
    """The metrics of a stage; [] where it has none yet."""
    return read_metrics(file) if file.exists() else []


def sparkline(values, *, width: int = 60) -> str:
    """At most `width` bars, each the mean of its share of the values, in [min, max]."""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / ((high - low) or 1.0)
    return "".join(BARS[round((m - low) * scale)] for m in means)


def command(argv) -> int:
    """The command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    flags = {
        "workdir": (None, "directory of the run (default: below runs/)"),
        "accept": ("", "inputs and config.fields, with commas, that may have changed"),
        "dry_run": (False, "prints stages, budgets and memory, checks them and ends"),
        "devices": (0, "of the dry run; 0 = as few as config.mesh allows"),
        "devices_per_host": (HOST_DEVICES, "of them at most: 4 on most TPU slices"),
        "device_memory_gb": (0.0, "of each, that a dry run must fit; 0 = unchecked"),
        **processes.FLAGS,
        "stall_seconds": (12.0, "of several hosts: one silent for so long ends all"),
    }
    config, given = configuration.parse_command_line(argv, flags=flags)
    if given["print_config"]:
        configuration.print_config(config)
        return 0
    if given["dry_run"]:
        names = "devices", "devices_per_host", "device_memory_gb"
        dry_run(config, **{name: given[name] for name in names})
        return 0
    configuration.validate(config)
    recipe = _without_overrides(argv)
    plain, _ = configuration.parse_command_line(recipe, flags=flags)
    own = {name: given[name] for name in (*processes.FLAGS, "stall_seconds")}
    meeting = processes.connected(**own)
    with preemption.handle_signals(config.checkpoint.grace_seconds), meeting:
        workdir = given["workdir"] or default_workdir(plain, config)
        main(config, workdir, accept=tuple(filter(None, given["accept"].split(","))))
    return 0


def _without_overrides(argv):
    """The arguments without --config.a=b, and without --config.a b."""
    kept, is_value = [], False
    for word in argv:
        is_field = word.startswith("--config.")
        if not is_field and not is_value:
            kept.append(word)
        is_value = is_field and "=" not in word
    return kept


def default_workdir(recipe, config) -> pathlib.Path:
    """runs/<name>, with what was overridden behind it: runs/quickstart-seed=1.

    What a run may change while it goes on is left out, so that the same run is found.
    """
    changed = [
        f"{name}={value}"
        for name, _, value in configuration.diff(recipe, config)
        if not is_free(name)
    ]
    words = [re.sub(r"[^\w.=+-]+", "_", text) for text in changed]
    label = "-".join([config.name, *words])
    if len(label) > MAX_LABEL:
        digest = configuration.fingerprint({"changed": changed})
        label = f"{label[:MAX_LABEL]}-{digest}"
    return pathlib.Path("runs") / label


if __name__ == "__main__":
    preemption.exit_process(configuration.run_command(command))
