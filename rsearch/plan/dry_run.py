"""Print and check what a run would do and take, before anything is loaded."""

import math
import os
import pathlib

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from rsearch.config.recipes import check_effective, validate
from rsearch.config.stage_plan import (
    WEIGHT_KINDS,
    check_plan,
    kind_of,
    kinds,
    stage_configs,
)
from rsearch.models.spec import DecoderSpec
from rsearch.plan.costs import (
    GB,
    HOST_DEVICES,
    SHARE,
    check_context,
    check_shared_devices,
    context_of,
    fewest_devices,
    limits_of,
    memory_of,
    most_written_and_read,
    read_tokens,
    rollouts_of_question,
    shape_of,
    with_rows,
)
from rsearch.runtime import console
from rsearch.setup.checks import check_layout, check_names

HOST_SHARE = 0.5  # of a machine's memory, which other processes also need
MEMORY_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")  # a container's, or "max"
COLUMNS = ("stage", "what", "value")


def dry_run(
    config: ConfigDict,
    *,
    devices: int = 0,
    devices_per_host: int = HOST_DEVICES,
    device_memory_gb: float = 0.0,
) -> None:
    """Print a run's stages, budgets and memory; refuse what cannot fit.

    Args:
        devices: number of devices of the run; 0 takes the fewest its mesh allows.
        devices_per_host: most devices of a host; each host decodes
            config.rollout.max_concurrent rows.
        device_memory_gb: 10^9 bytes of each device; 0 leaves the memory unchecked.

    Raises:
        ValueError: the configuration is not valid, a sequence is longer than a model's
            context, or a stage takes more memory than a device has.
    """
    validate(config)
    check_effective(config)
    check_names(config)
    check_plan(config)
    oversized = []
    plans, budgets, memories = [], [], []
    trained_models: dict[str, str] = {}
    for stage, c in stage_configs(config):
        if devices:  # each may have a mesh of its own
            validate(c, num_devices=devices)
        check_shared_devices(c)
        num_devices = devices or fewest_devices(c)
        spec = shape_of(c.model.source, c)
        model = c.model.source or "random weights"
        if kind_of(stage) in WEIGHT_KINDS:  # continues from an earlier stage's weights
            model = trained_models.get(c.trains, model)
            trained_models[c.trains] = f"that of {stage}"
        plans.append((stage, *_plan(c, stage, spec, model)))
        budgets += [(stage, *row) for row in _budget(c, stage, spec).items()]
        if spec is None:
            note = "a model that the run makes itself, or a tokenizer not yet made"
            memories.append((stage, f"not known before: {note}", None))
            continue
        check_context(c, stage, spec)
        check_layout(c, spec)
        c = with_rows(
            c,
            kind_of(stage),
            spec,
            num_devices=num_devices,
            host_devices=devices_per_host,
            memory=SHARE * GB * device_memory_gb or math.inf,
        )
        memory = memory_of(c, stage, spec, num_devices, host_devices=devices_per_host)
        memories += _memory_rows(stage, memory, num_devices)
        if device_memory_gb and memory.peak / GB > device_memory_gb:
            oversized.append((stage, memory.peak / GB, num_devices))
    heads = ("stage", "trains", "model", "parameters", "learns from")
    console.table(f"{config.name}: stages", heads, plans)
    console.table("budgets", COLUMNS, budgets)
    console.table("memory of each device, estimated", ("stage", "what", "GB"), memories)
    if oversized:
        texts = [f"{s}: {gb:.1f} GB on each of {n}" for s, gb, n in oversized]
        raise ValueError(
            f"does not fit devices of {device_memory_gb:g} GB: {'; '.join(texts)}; "
            "more devices (--devices, config.mesh), fewer "
            "config.rollout.max_concurrent, a smaller micro_batch, or "
            "config.model.remat"
        )


def _plan(c, stage, spec, model):
    """Return (trains, model, parameters, learns from) of a stage.

    Args:
        model: name of the weights that it starts from.
    """
    kind = kind_of(stage)
    size = f"{spec.num_params / 1e9:.3g} B" if spec else "-"
    source = c.sft.demonstrations if kind == "sft" else c.data.train
    if kind == "curate":
        return f"nothing: {c.curate.method}", model, size, source
    trains = c.trains if kind == "sft" else f"{c.trains}, {c.rl.algorithm}"
    if c.model.lora_rank:
        trains += f", LoRA of rank {c.model.lora_rank}"
    return trains, model, size, source


def _budget(c, stage, spec):
    """Return {what: value} of the tokens and rows that a stage processes."""
    kind, s = kind_of(stage), c.sft
    terms, tokens = context_of(c, kind)
    limit = f" of the model's {spec.max_context:,}" if spec else ""
    if kind == "sft":
        rows = s.steps * s.batch_size
        return {
            "tokens of a sequence": f"{tokens:,}{limit}",
            "a step": f"{s.batch_size} demonstrations, {s.micro_batch} a micro-batch",
            "all steps": f"{s.steps:,} = {rows:,} demonstrations, at most "
            f"{rows * tokens:,} tokens",
        }
    not_counted = f"tags of observations not counted{limit}"
    budget = {"tokens of a rollout": f"{terms} = {tokens:,}, {not_counted}"}
    if kind == "rl":
        return budget | _rl_budget(c, tokens)
    number = f"{c.data.max_train:,}" if c.data.max_train else "all of"
    budget["questions"] = f"{number} {c.data.train}"
    if c.curate.method == "chains":
        num_turns = c.curate.max_steps + c.curate.max_retries
        return budget | {"turns of a chain": f"at most {num_turns}"}
    num_rollouts = rollouts_of_question(c)
    return budget | {"rollouts of a question": f"at most {num_rollouts}"}


def _rl_budget(c, tokens):
    """Return {what: value} of the rows of an RL stage's steps, and of its tokens."""
    s, group, (limits, _) = c.rl, c.rollout.group_size, limits_of(c, "rl")
    num_written, _ = most_written_and_read(limits, tokens, read_tokens(c))
    questions, updates = s.questions_per_step, s.updates_per_step
    rows = questions * group
    total = s.steps * rows
    at_once = min(rows, c.rollout.max_concurrent) or "as fit"
    return {
        "a step": f"{questions} questions x {group} = {rows:,} rollouts, {at_once} at "
        "once",
        "an update": f"{updates} a step, each {rows // updates:,} rows, "
        f"{s.micro_batch} a micro-batch",
        "all steps": f"{s.steps:,} = {total:,} rollouts of {s.steps * questions:,} "
        f"questions, {s.steps * updates:,} updates",
        "all tokens": f"at most {total * tokens:,}, of which the policy writes "
        f"{total * num_written:,}",
    }


def _memory_rows(stage, memory, num_devices):
    """Yield (stage, what, GB) of a stage's memory, its peak last."""
    phases = (
        ("", memory.resident),
        ("rollout: ", memory.rolling),
        ("update: ", memory.updating),
        ("step: ", memory.stepping),
        ("evaluation: ", memory.evaluating),
        ("in its host's memory: ", memory.host),
    )
    for phase, parts in phases:
        for item, size in parts.items():
            yield stage, f"{phase}{item}", round(size / GB, 2)
    yield stage, f"peak on each of {num_devices} devices", round(memory.peak / GB, 2)


def with_rows_here(c: ConfigDict, spec: DecoderSpec, mesh: Mesh) -> ConfigDict:
    """Return a configuration with as many concurrent rollouts as fit on this machine.

    Evaluations of a run count the memory of its RL stage, which stays in use.

    Args:
        c: configuration of a stage or an evaluation; see `with_rows`.
        spec: shape of the model that rolls out.
        mesh: mesh of the devices of all hosts that roll out.

    Raises:
        ValueError: there is not even room for one rollout per device.
    """
    if c.rollout.max_concurrent:
        return c
    device = jax.local_devices()[0]
    c = with_rows(
        c,
        next((kind for kind in ("rl", "sft", "curate") if kind in kinds(c)), "sft"),
        spec,
        num_devices=mesh.size,
        host_devices=mesh.size // jax.process_count(),
        memory=device_memory(device),
    )
    r = c.rollout
    console.note(
        f"rollouts: {r.max_concurrent} at once, cache_tokens = {r.cache_tokens}"
    )
    return c


def device_memory(device: jax.Device) -> float:
    """Return the bytes of a device that a run may fill.

    A CPU may fill half of its machine's memory, or of the container's, shared evenly by
    the devices that it is split into.

    Raises:
        ValueError: an accelerator does not report its memory.
    """
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            raise ValueError(
                f"config.rollout.max_concurrent = 0: {device.device_kind} does not "
                "report how much memory it has; set a number"
            )
        return SHARE * stats["bytes_limit"]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = MEMORY_LIMIT.read_text().strip() if MEMORY_LIMIT.is_file() else ""
    if limit.isdecimal():
        total = min(total, int(limit))
    return HOST_SHARE * total / jax.local_device_count()
