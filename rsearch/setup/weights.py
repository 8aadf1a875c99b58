"""Load the weights that a run begins with and those that its stages have trained.

Checkpoints of adapters do not hold the base weights, and adapters are meaningless with
any other base. The base is found in the run: the last checkpoint of the stage before,
with that stage's own adapters merged, or else the policy's initial weights. A stage
cannot take more steps once the next stage has begun, so the base does not change.
"""

import functools
import os
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rsearch.config.stage_plan import START, kind_of, stage_configs
from rsearch.models.decoder import Decoder, init_params, param_shapes
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.lora import adapter_shapes, make_merge
from rsearch.models.sharding import param_shardings, shapes_with_shardings
from rsearch.models.spec import DecoderSpec
from rsearch.runtime import checkpoint, console
from rsearch.runtime.workdir import read_config
from rsearch.setup.context import Setup
from rsearch.types import Params


def initial_params(setup: Setup):
    """Return the policy's parameters before training, float32, over the mesh."""
    return initial_weights(setup.model, setup.source, setup.mesh, setup.config.seed)


def initial_weights(model: Decoder, source: pathlib.Path | None, mesh: Mesh, seed: int):
    """Return the weights before all stages, float32, over a mesh.

    Args:
        source: a Hugging Face directory; None draws random weights.
    """
    shardings = param_shardings(param_shapes(model.spec), mesh)
    if source is not None:
        return huggingface.load_params(source, model.spec, shardings=shardings)
    make = jax.jit(functools.partial(init_params, model), out_shardings=shardings)
    return make(jax.random.key(seed))


def trained_params(setup: Setup, folder: pathlib.Path) -> tuple[str, int, dict]:
    """Return (stage, step, parameters) of the run's newest policy.

    This is the policy of the last stage with a checkpoint, its adapters merged. Without
    any checkpoint it is ("start", 0, the parameters before training).
    """
    c = setup.config
    initial = functools.partial(initial_params, setup)
    for stage, stage_config in reversed(stage_configs(c)):
        model = stage_config.model
        is_policy = stage_config.trains == "policy" and model.source == c.model.source
        if kind_of(stage) == "curate" or not is_policy:
            continue
        # Without the moments, which are twice the size, and any value model.
        template = _template(model, setup.model.spec, setup.mesh)
        newest = checkpoint.newest_readable(
            folder / stage / checkpoint.FOLDER, template, is_part=True
        )
        if newest is not None:
            step, tree = newest
            console.note(f"policy: stage {stage} after step {step}")
            params = merged_weights(
                folder, stage, tree["params"], setup.model.spec, setup.mesh, initial
            )
            return stage, step, params
    return START, 0, initial()


def restored_weights(
    workdir: str | os.PathLike,
    stage: str,
    step: int,
    spec: DecoderSpec,
    mesh: Mesh,
    initial: Callable[[], dict],
):
    """Return the weights of a run's checkpoint, float32, with adapters merged.

    Args:
        workdir: the run's directory; its config.json says what each stage trained.
        initial: returns the weights before all stages.

    Raises:
        ValueError: the checkpoint, or one with its adapters' base, is missing.
    """
    folder = pathlib.Path(workdir) / stage / checkpoint.FOLDER
    model = _section(read_config(workdir), stage, "model")
    template = _template(model, spec, mesh)
    params = checkpoint.restore(folder, step, template, is_part=True)["params"]
    return merged_weights(workdir, stage, params, spec, mesh, initial)


def merged_weights(
    workdir: str | os.PathLike,
    stage: str,
    params: Params,
    spec: DecoderSpec,
    mesh: Mesh,
    initial: Callable[[], dict],
):
    """Merge a stage's parameters into their base if they are adapters.

    Args:
        workdir, initial: see `restored_weights`.

    Returns:
        The merged weights, float32; full weights are returned as they are.

    Raises:
        ValueError: the checkpoint with the adapters' base is missing.
    """
    model = _section(read_config(workdir), stage, "model")
    if not model["lora_rank"]:
        return params
    base = weights_before(workdir, stage, spec, mesh, initial)
    scale = model["lora_alpha"] / model["lora_rank"]
    return make_merge(mesh, scale, jnp.float32, donates=True)(base, params)


def weights_before(
    workdir: str | os.PathLike,
    stage: str,
    spec: DecoderSpec,
    mesh: Mesh,
    initial: Callable[[], dict],
):
    """Return the weights that a stage of a run begins with, float32.

    Args:
        workdir, initial: see `restored_weights`.

    Raises:
        ValueError: the last checkpoint of the stage before is missing.
    """
    stage_and_step = _stage_before(read_config(workdir), stage)
    if stage_and_step is None:
        return initial()
    return restored_weights(workdir, *stage_and_step, spec, mesh, initial)


def _template(model, spec, mesh):
    """Return the part of a checkpoint that a stage with this `model` trains."""
    shapes = param_shapes(spec)
    if rank := model["lora_rank"]:
        shapes = adapter_shapes(spec, rank=rank, matrices=model["lora_matrices"])
    return {"params": shapes_with_shardings(shapes, mesh)}


def _stage_before(config, stage):
    """Return the (stage, last step) with a stage's initial weights, or None."""

    def trains(name):
        overrides = config["overrides"].get(name, {})
        source = _section(config, name, "model")["source"]
        return overrides.get("trains", config["trains"]), source

    earlier_stages = config["stages"][: config["stages"].index(stage)]
    for name in reversed(earlier_stages):
        kind = kind_of(name)
        if kind == "curate" or trains(name) != trains(stage):
            continue
        if steps := _section(config, name, kind)["steps"]:
            return name, steps
    return None


def _section(config, stage, name):
    """Return a section of a stage's configuration from the run's, a plain dict."""
    return {**config[name], **config["overrides"].get(stage, {}).get(name, {})}
