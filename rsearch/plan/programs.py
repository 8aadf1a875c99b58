"""The compiled functions of a stage, and the shapes to compile them for.

They are the functions that a run compiles, but nothing is loaded and no array is made.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from rsearch.config.stage_plan import (
    IN_ROLLOUTS,
    WEIGHT_KINDS,
    kind_of,
    num_decode_rows,
    rollouts_of_step,
)
from rsearch.hosts.offload import DEVICE, HOST, check_host_memory
from rsearch.learn.batch import Batch, pack_segments, to_micro_batches
from rsearch.learn.packing import pack_micro_batches
from rsearch.learn.update import batch_shardings
from rsearch.models.decoder import Decoder
from rsearch.models.sharding import (
    DECODING_RULES,
    make_mesh,
    num_shards,
    own_mesh,
    replicated,
    shapes_with_shardings,
    with_shardings,
)
from rsearch.plan.costs import (
    agents_memory,
    asked_memory,
    copies_weights,
    group_of_data_stage,
    has_int8_kernels,
    limits_of,
    most_written_and_read,
    passages_memory,
    read_tokens,
    rolls_out_ahead,
    shape_of,
)
from rsearch.plan.machines import Machine
from rsearch.rollout.conversation import conversation_tokens
from rsearch.rollout.decode import Sampler, row_shardings
from rsearch.rollout.interface import DecodeRequest
from rsearch.rollout.pages import num_pages
from rsearch.rollout.scheduler import admission_sizes
from rsearch.setup.context import ModelContext
from rsearch.setup.learners import (
    has_critic,
    make_trainer,
    make_weight_merge,
    state_shapes,
    weight_shapes,
)
from rsearch.setup.policy import policy_protocol

ADMIT = "admit"  # the program that copies prompts into rows, its first argument
ROLLOUT_PROGRAMS = ("merge", "prefill", ADMIT, "extend", "decode")
STEP = "'s step"  # ends the name of a program that applies another's gradients


class Program(NamedTuple):
    """One compiled function in a step of its stage.

    Attributes:
        args: shapes of its arguments, with shardings.
        calls: how often a step calls it, at most.
        rounds: most rounds of each of its loops whose length depends on the data.
        other_bytes: bytes in use on each device while it runs, besides its arguments.
        num_devices: number of devices that it is spread over.
    """

    name: str
    function: object
    args: tuple
    calls: float
    rounds: float
    other_bytes: float
    num_devices: int


def device_bytes(tree: Any) -> float:
    """Return the bytes on each device of a tree of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != HOST
    )


def make_context(config: ConfigDict, stage: str, machine: Machine) -> ModelContext:
    """Return the context of a stage's programs, for a machine that is not here.

    Raises:
        ValueError: the mesh does not fit the machine, or the model is not known before
            the run.
    """
    spec = shape_of(config.model.source, config)
    if spec is None:
        raise ValueError(
            f"{stage}: config.model.source = {config.model.source!r} is not known "
            "before the run makes it, or its tokenizer; set config.model.source, or "
            "config.model.vocab_size"
        )
    kind = kind_of(stage)
    limits, markup = limits_of(config, kind)
    tokens = limits.max_tokens or conversation_tokens(limits, markup)
    if _is_chained(config, kind):
        max_prompt_tokens = tokens - limits.max_turn_tokens
        limits = dataclasses.replace(
            limits, max_searches=0, max_prompt_tokens=max_prompt_tokens
        )
    if kind == "curate" and config.curate.method == "no_reasoning":
        limits = dataclasses.replace(limits, max_searches=0)  # a chain is one turn
    m = config.model
    mesh = make_mesh(**config.mesh, devices=machine.devices)
    if m.offload:
        check_host_memory(mesh, f"config.model.offload = {m.offload}")
    return ModelContext(
        config=config,
        mesh=mesh,
        model=Decoder(spec, dtype=jnp.dtype(m.dtype), remat=m.remat),
        limits=limits,
        num_tokens=config.sft.sequence_tokens if kind == "sft" else tokens,
    )


def stage_programs(frame: ModelContext, stage: str, machine: Machine) -> list[Program]:
    """Return the programs of a step; those of a data stage fill all its rows once.

    Raises:
        ValueError: the mesh does not divide the model, or the devices of a host.
    """
    kind = kind_of(stage)
    if kind == "curate":
        return filled_once(frame, kind, machine)
    state = state_shapes(frame, kind)
    if kind == "sft":
        return _update_programs(frame, kind, state, other_bytes=_reference_bytes(frame))
    c, resident = frame.config, device_bytes(state)
    if "reference" not in c.model.offload:
        resident += device_bytes(weight_shapes(frame))
    group = c.rollout.group_size
    # Each host takes as many as the one with the most questions.
    most_rollouts = machine.num_hosts * rollouts_of_step(c, machine.num_hosts)
    sizes = {"rollouts": most_rollouts, "group": group}
    rollouts = _rollout_programs(frame, kind, machine, resident=resident, **sizes)
    ahead = 0
    if rolls_out_ahead(c, kind):
        (decode,) = [p for p in rollouts if p.name == "decode"]
        params, rows = decode.args[:2]
        ahead = device_bytes((params, rows))
    return [
        *_merge_programs(frame, state),
        *rollouts,
        *_learning_programs(frame, state, ahead=ahead),
    ]


def filled_once(frame: ModelContext, kind: str, machine: Machine) -> list[Program]:
    """Return the programs that fill all rows of each host once.

    Args:
        frame: context with the limits of these rollouts.
        kind: kind of the stage that makes them, or is evaluated by them.
    """
    c = frame.config
    resident = device_bytes(weight_shapes(frame))
    rollouts = c.rollout.max_concurrent * machine.num_hosts
    group = c.eval.samples if kind in WEIGHT_KINDS else group_of_data_stage(c)
    if _is_chained(c, kind):  # a step that cannot be used is requested again
        rollouts *= c.curate.max_steps + c.curate.max_retries
    sizes = {"rollouts": rollouts, "group": group}
    return _rollout_programs(frame, kind, machine, resident=resident, **sizes)


def _is_chained(c, kind):
    """Return whether each turn rereads everything before it as a new prompt."""
    return kind == "curate" and c.curate.method == "chains"


def _reference_bytes(frame):
    """Return the bytes on each device of the weights that a stage began with.

    It is 0 if they are offloaded to the hosts, or if they are the base of adapters,
    which is an argument of the programs that train.
    """
    m = frame.config.model
    if m.lora_rank or "reference" in m.offload:
        return 0
    return device_bytes(weight_shapes(frame))


def _index_and_model_bytes(frame, kind):
    """Return the bytes on each device of an index and of models beside the policy."""
    devices = [*frame.mesh.devices.flat]
    num_local = sum(d.process_index == devices[0].process_index for d in devices)
    sizes = agents_memory(frame.config, kind) | passages_memory(frame.config, num_local)
    return sum(sizes.values())


def _merge_programs(frame, state):
    """Return the programs that merge adapters into the weights used for decoding."""
    if not frame.config.model.lora_rank:
        return []
    base = weight_shapes(frame)
    other_bytes = device_bytes(state) - device_bytes(state.params)
    other_bytes += _index_and_model_bytes(frame, "rl")
    merge = make_weight_merge(frame)(jnp.dtype(frame.model.dtype), False)
    size = frame.mesh.size
    return [Program("merge", merge, (base, state.params), 1, 1, other_bytes, size)]


def _rollout_programs(frame, kind, machine, *, resident, rollouts, group):
    """Return the programs of rollouts, on the devices of one host or of all.

    Their counts are upper limits: every turn and every observation uses its whole
    budget.

    Args:
        frame, kind, machine: see `filled_once`; a step of "rl" may have int8 kernels.
        resident: bytes of the policy that stay on each device.
        rollouts: rollouts of all hosts together.
        group: rollouts that share a prompt.
    """
    c, limits = frame.config, frame.limits
    agent_caches = asked_memory(c, IN_ROLLOUTS, machine.host_devices)
    resident += _index_and_model_bytes(frame, kind) + sum(agent_caches.values())
    # Number of hosts that share a program, which then has the rows of all of them.
    hosts = machine.num_hosts if c.rollout.global_mesh else 1
    mesh = frame.mesh
    if hosts == 1:
        mesh = own_mesh(mesh, host=machine.devices[0].process_index)
    sampler = _sampler(frame, mesh, has_int8_kernels=has_int8_kernels(c, kind))
    sharding = replicated(mesh)

    def host_array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    weights = weight_shapes(frame)
    params = jax.eval_shape(sampler.cast_params, weights)
    params = shapes_with_shardings(params, mesh, DECODING_RULES)
    if not copies_weights(c, kind):
        resident -= device_bytes(weights)  # `params` are these
    num_rollouts = math.ceil(rollouts / machine.num_hosts)
    num_rows = num_decode_rows(c.rollout.max_concurrent, num_rollouts)
    parts = max(1, sampler.row_shards(num_rows * hosts) // hosts)
    moved_rows, block = (hosts * n for n in admission_sizes(num_rows, group, parts))
    num_rows *= hosts
    pages = num_pages(sampler, num_rows, hosts * c.rollout.cache_tokens)
    rows = jax.eval_shape(lambda: sampler.empty(num_rows, pages))
    rows = with_shardings(rows, row_shardings(rows, mesh))
    prompts = host_array(block, limits.max_prompt_tokens), host_array(block)
    context = jax.eval_shape(sampler.prefill, params, *prompts)
    context = with_shardings(context, row_shardings(context, mesh))
    num_read = read_tokens(c)
    key = jax.eval_shape(lambda: jax.random.key(0))
    moves = host_array(moved_rows)
    # The pages that each row holds, if rows share pages.
    moving = [host_array(moved_rows, sampler.row_pages)] if pages else []
    request = DecodeRequest(
        names=host_array(num_rows, 2, dtype=jnp.uint32),
        begins=host_array(num_rows, dtype=jnp.bool_),
        budget=host_array(num_rows),
        min_finished=host_array(),
        max_steps=host_array(),
        table=host_array(num_rows, sampler.row_pages) if pages else None,
    )
    room = pages // sampler.row_pages or num_rows
    rollouts *= hosts / machine.num_hosts
    chunk = c.rollout.extend_chunk
    num_written, num_reads = most_written_and_read(limits, frame.num_tokens, num_read)
    calls = {  # name -> arguments, calls, rounds of its loop
        "prefill": (
            (params, *prompts),
            rollouts / group / block,
            -(-limits.max_prompt_tokens // chunk),
        ),
        ADMIT: ((rows, context, moves, moves, *moving), rollouts / moved_rows, 1),
        "extend": (
            (params, rows, moves, host_array(moved_rows, num_read), moves, *moving),
            rollouts * num_reads / moved_rows,
            -(-num_read // chunk),
        ),
        "decode": (
            (params, rows, host_array(dtype=key.dtype), request),
            1,
            # As many decode together as there are rows, and room for the longest.
            num_written * rollouts / min(num_rows, rollouts, room),
        ),
    }
    live_arrays = params, rows, context

    def program(name, args, count, rounds):
        other_arrays = [x for x in live_arrays if not any(x is arg for arg in args)]
        other_bytes = resident + sum(map(device_bytes, other_arrays))
        function = getattr(sampler, name)
        return Program(name, function, args, count, rounds, other_bytes, mesh.size)

    return [program(name, *call) for name, call in calls.items() if call[1]]


def _sampler(frame, mesh, *, has_int8_kernels):
    """Return the functions that roll out."""
    c = frame.config
    # As many states as the automaton of its stop strings can have, with any contents.
    states = sum(map(len, policy_protocol(c).stop_strings)) + 1
    return Sampler(
        frame.model,
        mesh,
        stop_table=np.zeros((states, frame.model.spec.vocab_size), np.uint8),
        eos_ids=[0],
        num_slots=frame.num_tokens,
        max_turn_tokens=frame.limits.max_turn_tokens,
        chunk=c.rollout.extend_chunk,
        temperature=c.rollout.temperature,
        top_p=c.rollout.top_p,
        page_tokens=c.rollout.page_tokens,
        has_int8_kernels=has_int8_kernels,
        allow_blocks=False,  # blocks are for CPUs, which here stand for accelerators
    )


def _learning_programs(frame, state, *, ahead):
    """Return the programs that score and train, on the devices of all hosts.

    Args:
        ahead: bytes of rollouts that go on meanwhile.
    """
    c, s = frame.config, frame.config.rl
    trainer = make_trainer(frame, "rl")
    agents = _index_and_model_bytes(frame, "rl") + _reference_bytes(frame) + ahead
    base = trainer.base_of(weight_shapes(frame))
    batch = _batch(frame, "rl")
    state_bytes = device_bytes(state) - device_bytes(state.params)
    programs = []
    calls = (s.old_logprobs == "recompute") + (s.kl_coef > 0)
    if calls:
        args, other_bytes = (state.params, base, batch), state_bytes + agents
        if s.kl_coef and "reference" in c.model.offload:
            other_bytes += device_bytes(state.params)  # it is loaded for scoring
        programs.append(
            _global_program(frame, "score", trainer.score, args, calls, other_bytes)
        )
    if has_critic(frame, "rl"):
        critic_bytes = device_bytes(state.critic)
        minibatch = _batch(frame, "rl", updates=s.updates_per_step, has_values=True)
        resident = device_bytes(state) + agents
        args = (state.critic.params, base, batch)
        other_bytes = resident - device_bytes(state.critic.params)
        score_values = "value score", trainer.score_values
        programs.append(_global_program(frame, *score_values, args, 1, other_bytes))
        update_settings = (base, minibatch), s.updates_per_step, resident - critic_bytes
        programs += _step_programs(
            frame, "value update", trainer.update_values, state.critic, *update_settings
        )
    return [*programs, *_update_programs(frame, "rl", state, other_bytes=agents)]


def _update_programs(frame, kind, state, *, other_bytes):
    """Return the programs of the policy's update; `other_bytes` excludes the critic."""
    s = frame.config[kind]
    trainer = make_trainer(frame, kind)
    updates = s.get("updates_per_step", 1)
    has_values = has_critic(frame, kind)
    memory = None
    if kind == "rl" and s.memorise_coef:
        memory = _batch(frame, kind, num_rows=s.memorise_rows)
    base = trainer.base_of(weight_shapes(frame))
    batch = _batch(frame, kind, updates=updates, has_values=has_values)
    if state.critic is not None:
        other_bytes += device_bytes(state.critic)
    policy, arguments = state._replace(critic=None), (base, batch, memory)
    return _step_programs(
        frame, "update", trainer.update, policy, arguments, updates, other_bytes
    )


def _step_programs(frame, name, update, state, arguments, calls, other_bytes):
    """Return the programs of an optimizer step: two if moments are offloaded."""
    if "optimizer" not in frame.config.model.offload:
        args = state, *arguments
        return [
            _global_program(frame, name, update, args, calls, other_bytes, donated=(0,))
        ]
    state_args = state.params, state.kl_coef
    args = *state_args, *arguments
    gradients = f"{name}'s gradient", update.gradients, args, calls, other_bytes
    device_state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=x.sharding.with_memory_kind(DEVICE)
        ),
        state,
    )
    other_bytes += device_bytes(arguments[0])  # the weights that adapters belong to
    step = f"{name}{STEP}", update.step, (device_state, *state_args), calls, other_bytes
    return [
        _global_program(frame, *gradients),
        _global_program(frame, *step, donated=(0,)),
    ]


def _global_program(frame, name, function, args, calls, other_bytes, *, donated=()):
    """Return a program over the devices of all hosts, on rows of full length."""
    function = jax.jit(function, donate_argnums=donated)
    return Program(name, function, args, calls, 1, other_bytes, frame.mesh.size)


def _batch(frame, kind, *, updates=1, has_values=False, num_rows=None) -> Batch:
    """Return shapes of the rows of a step, or of one of its updates."""
    c = frame.config
    s = c[kind]
    if num_rows is None:
        rows = s.batch_size if kind == "sft" else 0
        num_rows = rows or s.questions_per_step * c.rollout.group_size // updates
    micro_batch = to_micro_batches(
        pack_segments([()] * s.micro_batch, frame.num_tokens), s.micro_batch
    )
    micro_batch = pack_micro_batches(micro_batch, multiple=num_shards(frame.mesh))
    if kind == "rl":
        zeros = np.zeros(micro_batch.tokens.shape, np.float32)
        if has_values:
            micro_batch = micro_batch._replace(values=zeros, returns=zeros)
        if s.old_logprobs == "recompute" and s.tis_cap:
            micro_batch = micro_batch._replace(sampled_logp=zeros)
    count = num_rows // s.micro_batch
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), micro_batch
    )
    return with_shardings(shapes, batch_shardings(shapes, frame.mesh))
