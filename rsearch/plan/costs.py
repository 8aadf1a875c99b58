"""Estimate the tokens and bytes of a stage from its configuration alone.

No weights, data or devices are needed. XLA's temporary buffers are not included.
"""

import dataclasses
import math
from collections.abc import Iterable

from ml_collections import ConfigDict

from rsearch.config.stage_plan import (
    IN_ROLLOUTS,
    STAGE_PREFIX,
    URLS,
    kind_of,
    num_decode_rows,
    roles_of,
    rollouts_of_step,
    round_size,
)
from rsearch.learn.packing import piece_rows
from rsearch.models.attention.blocked import block_size
from rsearch.models.hf.families import PUBLISHED, read_spec
from rsearch.models.lora import num_adapter_params
from rsearch.models.spec import DecoderSpec
from rsearch.protocols.table import make_protocol
from rsearch.retrieval.index import read_index_manifest
from rsearch.rollout.conversation import (
    Limits,
    Markup,
    check_max_tokens,
    conversation_tokens,
    explain_conversation_tokens,
    tokens_between_turns,
    untagged_markup,
)
from rsearch.runtime.files import expand
from rsearch.setup.policy import configured_limits

GB = 1e9
HOST_DEVICES = 8  # devices of most GPU hosts; many TPU hosts have 4
BYTES = {"float32": 4, "bfloat16": 2}
FLOAT32 = BYTES["float32"]
RUN_MADE_SOURCES = ("world:", STAGE_PREFIX)  # sources of models that a run makes itself
PER_ROLLOUT = ("keys and values", "next tokens' logits")  # grow with each rollout
SHARE = 0.85  # of an accelerator's memory; XLA holds more than an estimate counts
MOST_ROWS = 256  # rollouts at once if no step limits their number
# Rollouts are seldom as long as they may be. If memory cannot hold all of a step's
# rollouts at their longest, this many times the number that fits share its pages.
OVERSUBSCRIPTION = 2
SCORE_COPIES = 3  # attention's scores exist three times: logits, weights, gradient


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device, by what they are for.

    Attributes:
        resident: {what: bytes} in use during the whole stage.
        rolling: {what: bytes} while it rolls out, or while it asks a model about
            finished rollouts, whichever is more.
        updating: {what: bytes} while it updates; not at the same time as `rolling`,
            whose next rollouts it includes if they go on meanwhile.
        stepping: {what: bytes} in the optimizer's step, if moments are offloaded.
        evaluating: {what: bytes} while the policy is evaluated after a stage without
            rollouts; these are all bytes in use by then, in place of `resident`.
        host: {what: bytes} that are offloaded to the memory of its host.
    """

    resident: dict[str, float]
    rolling: dict[str, float]
    updating: dict[str, float]
    stepping: dict[str, float] = dataclasses.field(default_factory=dict)
    evaluating: dict[str, float] = dataclasses.field(default_factory=dict)
    host: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def peak(self) -> float:
        """Return the most bytes in use at any time."""
        phases = self.rolling, self.updating, self.stepping
        resident_bytes = sum(self.resident.values())
        largest = resident_bytes + max(sum(phase.values()) for phase in phases)
        return max(largest, sum(self.evaluating.values()))


def shape_of(
    source: str, c: ConfigDict, *, section: str = "model"
) -> DecoderSpec | None:
    """Return the shape of a model by its source, without its weights.

    Args:
        source: a value of config.model.source; "" is the shape in config.model.
        section: section of the configuration that names the model.

    Returns:
        Its shape; None for a model that the run makes itself or that is at an endpoint,
        and for one whose vocabulary is the embedded tokenizer's.

    Raises:
        ValueError: a hub id whose shape is not known here.
    """
    if source.startswith((*RUN_MADE_SOURCES, *URLS)):
        return None
    if not source:
        m = c.model
        names = [f.name for f in dataclasses.fields(DecoderSpec) if f.name in m]
        return DecoderSpec(**{n: m[n] for n in names}) if m.vocab_size else None
    if (directory := expand(source)).joinpath("config.json").is_file():
        return read_spec(directory)
    if source not in PUBLISHED:
        raise ValueError(
            f"config.{section}.source = {source!r}: its shape is not known without its "
            "files; name a directory with its config.json, or one of "
            f"{', '.join(PUBLISHED)}"
        )
    return PUBLISHED[source]


def limits_of(c: ConfigDict, kind: str) -> tuple[Limits, Markup]:
    """Return the limits of a stage's rollouts, and an observation's markup.

    The tags around observations are not counted, since no tokenizer is read.
    """
    searches = c.rollout.max_searches
    if kind == "curate":
        searches_by_method = {
            "answerable": c.curate.retry_searches,
            "chains": c.curate.max_steps - 1,
        }
        searches = max(searches, searches_by_method.get(c.curate.method, 0))
    limits = dataclasses.replace(configured_limits(c), max_searches=searches)
    protocol = make_protocol(
        c.protocol.name, max_queries=c.protocol.max_queries or None
    )
    return limits, untagged_markup(protocol)


def read_tokens(c: ConfigDict) -> int:
    """Return the most tokens that a policy's rollout reads between two turns."""
    return tokens_between_turns(*limits_of(c, "rl"))


def context_of(c: ConfigDict, kind: str) -> tuple[str, int]:
    """Return what makes up the longest sequence of a stage, and its tokens.

    Raises:
        ValueError: config.rollout.context_tokens is too small.
    """
    if kind == "sft":
        return "sequence", c.sft.sequence_tokens
    limits, markup = limits_of(c, kind)
    check_max_tokens(limits, markup)
    if limits.max_tokens:
        return "config.rollout.context_tokens", limits.max_tokens
    terms = explain_conversation_tokens(limits, markup)
    return terms, conversation_tokens(limits, markup)


def most_written_and_read(
    limits: Limits, num_tokens: int, observation_tokens: int
) -> tuple[int, float]:
    """Return the most tokens that a policy writes, and observations that it reads.

    config.rollout.context_tokens may leave less room than the turns of a rollout take.

    Args:
        limits: limits of the rollout.
        num_tokens: tokens of the longest rollout.
        observation_tokens: tokens of the longest observation.
    """
    num_written = min(limits.num_turns * limits.max_turn_tokens, num_tokens)
    # An observation is read only if another turn fits after it.
    room = (num_tokens - limits.max_turn_tokens) / observation_tokens
    return num_written, min(limits.num_turns - 1, room)


def check_context(c: ConfigDict, stage: str, spec: DecoderSpec) -> None:
    """Refuse sequences that are longer than a model's context.

    Raises:
        ValueError: a sequence is too long; the message has the arithmetic.
    """
    parts, tokens = context_of(c, kind_of(stage))
    if tokens > spec.max_context:
        raise ValueError(
            f"{stage}: {parts} = {tokens:,} tokens, but the context of "
            f"{c.model.source or 'config.model'} is {spec.max_context:,}"
        )


def check_shared_devices(c: ConfigDict) -> None:
    """Refuse rollouts on devices of their own.

    Raises:
        ValueError: config.rollout.devices is set.
    """
    if c.rollout.devices:
        raise ValueError(
            f"config.rollout.devices = {c.rollout.devices}: in a plan all devices "
            "train and roll out; plan with 0 and the number of devices that train, or "
            "that roll out"
        )


def fewest_devices(c: ConfigDict) -> int:
    """Return the number of devices of the smallest mesh that is allowed."""
    return max(c.mesh.data, 1) * c.mesh.fsdp * c.mesh.tensor


def rollouts_of_question(c: ConfigDict) -> int:
    """Return the most rollouts of one question in a data stage.

    Args:
        c: the stage's configuration. A chain counts as one rollout.
    """
    # Every round rolls out all of its rollouts.
    passes = [(n, round_size(c.rollout.group_size, n)) for n in _passes(c.curate)]
    return sum(math.ceil(number / size) * size for number, size in passes)


def group_of_data_stage(c: ConfigDict) -> int:
    """Return the fewest rollouts of a question that share a prompt's prefill."""
    if c.curate.method in ("no_reasoning", "chains"):
        return 1
    passes = _passes(c.curate) or [1]
    return min(round_size(c.rollout.group_size, number) for number in passes)


def _passes(curate):
    """Return the most rollouts of a question in each pass of a data stage."""
    passes = [] if curate.first else [curate.rollouts]
    if curate.method == "answerable" and curate.retry_rollouts:
        passes.append(curate.retry_rollouts)
    return {
        "mix": [],  # their difficulty is known
        "no_reasoning": [1],
        "chains": [1],
        "self_rag": [],  # the labels have the model's answers
        "self_ask": [],  # gold annotations say what to search for
        "oracle": [],
    }.get(curate.method, passes)


def memory_of(
    c: ConfigDict, stage: str, spec: DecoderSpec, num_devices: int, *, host_devices: int
) -> Memory:
    """Return the bytes that a stage takes on each device.

    Args:
        spec: shape of the model that it trains or asks.
        num_devices: devices of the whole mesh.
        host_devices: devices of a host; each host decodes
            config.rollout.max_concurrent rows.
    """
    kind, local_devices = kind_of(stage), min(num_devices, host_devices)
    num_trained = _num_trained(c, spec)
    moment_bytes = 2 * BYTES[c.optim.moments_dtype]
    moments = moment_bytes * num_trained
    weights = FLOAT32 * _params_here(c, spec) / c.mesh.fsdp
    resident, host = {"weights": weights}, {}
    moments_memory = host if "optimizer" in c.model.offload else resident
    if kind != "curate":
        moments_memory["Adam moments"] = moments
        if c.model.lora_rank:
            resident["adapters"] = FLOAT32 * num_trained
        else:
            reference_memory = host if "reference" in c.model.offload else resident
            reference_memory["weights it began with"] = FLOAT32 * num_trained
    if kind == "rl" and c.rl.algorithm == "ppo":
        # A value model has a number for each token instead of a matrix of logits.
        critic_spec = dataclasses.replace(spec, tie_embeddings=True)
        num_critic = _num_trained(c, critic_spec)
        resident["critic"] = FLOAT32 * num_critic
        moments_memory["critic's moments"] = moment_bytes * num_critic
    rolling, evaluating, rows = {}, {}, c.rollout.max_concurrent
    if kind == "rl":
        hosts = math.ceil(num_devices / host_devices)
        rows = num_decode_rows(rows, rollouts_of_step(c, hosts))
    if kind != "sft":
        resident |= passages_memory(c, local_devices) | agents_memory(c, kind)
        rolling = _rollout_memory(c, kind, spec, local_devices, rows)
    elif c.trains == "policy" and c.eval.methods:
        evaluating = {"weights": weights} | agents_memory(c, kind)
        evaluating |= passages_memory(c, local_devices)
        evaluating |= _rollout_memory(c, kind, spec, local_devices, rows)
    updating = {} if kind == "curate" else _update_memory(c, kind, spec, num_devices)
    ahead = {}
    if rolls_out_ahead(c, kind):
        # The update reuses the buffers of the weights, so that rollouts have their own.
        ahead = rolling | {"copy that decodes": rolling["copy that decodes"] or weights}
    updating |= ahead
    stepping = {}
    if kind != "curate" and "optimizer" in c.model.offload:
        stepping = {"gradients": FLOAT32 * num_trained, "Adam moments": moments} | ahead
    return Memory(resident, rolling, updating, stepping, evaluating, host)


def rolls_out_ahead(c: ConfigDict, kind: str) -> bool:
    """Return whether the devices that update roll out the next step meanwhile."""
    return kind == "rl" and c.rl.max_staleness > 0 and not c.rollout.devices


def with_rows(
    c: ConfigDict,
    kind: str,
    spec: DecoderSpec,
    *,
    num_devices: int,
    host_devices: int,
    memory: float,
) -> ConfigDict:
    """Return a configuration with as many concurrent rollouts as fill the memory.

    All rollouts of a step decode together if each has room for the longest one.
    Otherwise the KV cache is in pages, shared by up to `OVERSUBSCRIPTION` times as many
    rollouts as would fit, if each device has room for two of the longest.

    Args:
        c: configuration of a stage or an evaluation; returned as it is unless its
            rollout.max_concurrent is 0.
        kind: kind of the stage; "sft" stands for an evaluation next to weights only.
            The number of rollouts is known only for "rl".
        spec: shape of the model that rolls out.
        num_devices: devices of the whole mesh.
        host_devices: devices of a host; each host has such rows.
        memory: bytes of each device that may be filled; infinity if not known.

    Raises:
        ValueError: there is not even room for one rollout per device.
    """
    if c.rollout.max_concurrent:
        return c
    local_devices = min(num_devices, host_devices)
    shards = max(local_devices // c.mesh.tensor, 1)
    step_rollouts = rollouts_of_step(c, math.ceil(num_devices / host_devices))
    max_rows = -(-(step_rollouts if kind == "rl" else MOST_ROWS) // shards) * shards
    if kind == "rl":
        stage_memory = memory_of(c, kind, spec, num_devices, host_devices=local_devices)
        resident = stage_memory.resident
    else:
        resident = {"weights": FLOAT32 * _params_here(c, spec) / c.mesh.fsdp}
        resident |= passages_memory(c, local_devices) | agents_memory(c, kind)
    decoding = _decoding_memory(c, kind, spec, local_devices, rows=0)
    if rolls_out_ahead(c, kind):
        decoding |= stage_memory.updating
    row_bytes = rollout_bytes(c, kind, spec, local_devices)
    used_bytes = sum(resident.values()) + sum(decoding.values())
    used_bytes += sum(asked_memory(c, IN_ROLLOUTS, local_devices).values())
    num_rows = math.floor(min(max_rows, (memory - used_bytes) / row_bytes))
    num_rows -= num_rows % shards
    if num_rows < shards:
        raise ValueError(
            f"config.rollout.max_concurrent = 0: with {used_bytes / GB:.1f} GB in use, "
            f"there is no room for {shards} rollouts of "
            f"{row_bytes * shards / GB:.2f} GB in the {memory / GB:.1f} GB of each "
            "device"
        )
    tokens = _rollout_tokens(c, kind)
    room, page = num_rows * tokens, c.rollout.page_tokens
    longest = (-(-tokens // page) + 1) * page  # a page more, for observations' tags
    rows = {"max_concurrent": num_rows}
    if c.rollout.cache_tokens:  # the user has set the cache's size
        rows = {"max_concurrent": max_rows}
    elif num_rows < max_rows and room // shards >= 2 * longest:
        rows = {
            "max_concurrent": min(max_rows, OVERSUBSCRIPTION * num_rows),
            "cache_tokens": room,
        }
    c = c.copy_and_resolve_references()
    c.rollout.update(rows)
    return c


def _params_here(c, spec):
    """Return the number of parameters on a device if only `tensor` shards them.

    A vocabulary that `tensor` does not divide is whole on every device.
    """
    tensor, matrices = c.mesh.tensor, 1 if spec.tie_embeddings else 2
    table_params = matrices * spec.vocab_size * spec.width
    unsharded = table_params if spec.vocab_size % tensor else 0
    return (spec.num_params - unsharded) / tensor + unsharded


def _num_trained(c, spec):
    """Return the most parameters on each device that an update changes."""
    m = c.model
    if m.lora_rank:
        return num_adapter_params(spec, rank=m.lora_rank, matrices=m.lora_matrices)
    return _params_here(c, spec) / c.mesh.fsdp


def passages_memory(c: ConfigDict, host_devices: int) -> dict[str, float]:
    """Return {what: bytes} on each device of an index that a host's devices hold.

    It is {} if the index is not on this machine, which may only plan the run.
    """
    path = expand(c.retrieval.index)
    if not c.retrieval.on_devices or not path.is_dir():
        return {}
    manifest = read_index_manifest(path)
    if "encoder" not in manifest:  # an index of words, which `check_index` refuses
        return {}
    size = manifest["corpus"]["num_passages"] * manifest["encoder"]["dim"]
    return {"passages' vectors": size * BYTES["bfloat16"] / host_devices}


def agents_memory(c: ConfigDict, kind: str) -> dict[str, float]:
    """Return {what: bytes} of models that a stage asks and that run on its devices.

    The float32 weights that they are converted from are not kept.
    """
    size = BYTES[c.model.dtype]
    return {
        f"{name}'s weights": size * _params_here(c, spec)
        for name, spec in _agents(c, roles_of(kind)).items()
    }


def asked_memory(
    c: ConfigDict, names: Iterable[str], host_devices: int
) -> dict[str, float]:
    """Return {what: bytes} of the largest KV cache of models asked one at a time."""
    caches = {}
    for name, spec in _agents(c, names).items():
        s = c.models[name]
        # Prefilled prompts exist in addition to the rows that they are moved into.
        tokens = s.max_concurrent * (2 * s.max_prompt_tokens + s.max_reply_tokens)
        size = tokens * _token_bytes(c, spec) / host_devices
        caches[f"{name}'s keys and values"] = size
    return dict(sorted(caches.items(), key=lambda item: item[1])[-1:])


def _agents(c, names):
    """Return {name: shape} of those models that run here and whose shape is known."""
    specs = {}
    for name in names:
        source = c.models[name].source
        # A model that another stage of the run trains has this stage's shape.
        shape_source = c.model.source if source.startswith(STAGE_PREFIX) else source
        spec = shape_of(shape_source, c, section=f"models.{name}") if source else None
        if spec is not None:
            specs[name] = spec
    return specs


def _token_bytes(c, spec):
    """Return bytes of the keys and values of one token."""
    heads = spec.num_layers * spec.num_kv_heads
    return 2 * heads * spec.head_dim * BYTES[c.model.dtype]


def _rollout_tokens(c, kind):
    """Return the tokens of the longest rollout of a stage or of its evaluation."""
    return context_of(c, "rl" if kind == "sft" else kind)[1]


def _rollout_memory(c, kind, spec, devices, rows):
    """Return {what: bytes} of a stage's rollouts and of the models that they ask."""
    usage, copy = _decoding_memory(c, kind, spec, devices, rows), "copy that decodes"
    later_usage = {copy: usage[copy]} | asked_memory(c, roles_of(kind), devices)
    usage |= asked_memory(c, IN_ROLLOUTS, devices)
    return max(usage, later_usage, key=lambda parts: sum(parts.values()))


def rollout_bytes(
    c: ConfigDict, kind: str, spec: DecoderSpec, host_devices: int
) -> float:
    """Return the bytes of one rollout at its longest on each device of a host."""
    row = _decoding_memory(c, kind, spec, host_devices, rows=1)
    return sum(row[name] for name in PER_ROLLOUT)


def copies_weights(c: ConfigDict, kind: str) -> bool:
    """Return whether rollouts of a stage's kind decode with a copy of the weights."""
    is_other_dtype = c.model.dtype != "float32" or has_int8_kernels(c, kind)
    return is_other_dtype or c.mesh.fsdp > 1 or c.model.lora_rank > 0


def has_int8_kernels(c: ConfigDict, kind: str) -> bool:
    """Return whether rollouts of a stage's kind decode with 8-bit kernels."""
    return c.rollout.int8_kernels and kind == "rl"


def _decoding_memory(c, kind, spec, local_devices, rows):
    """Return {what: bytes} of rollouts: weights to decode with, cache and logits."""
    size = BYTES[c.model.dtype]
    copy_bytes = size * _params_here(c, spec) if copies_weights(c, kind) else 0
    if has_int8_kernels(c, kind):
        matrices = 1 if spec.tie_embeddings else 2
        embedded = matrices * spec.vocab_size * spec.width
        int8_params = (spec.num_params - embedded) / c.mesh.tensor
        copy_bytes = size * (_params_here(c, spec) - int8_params) + int8_params
    cached_tokens = rows * _rollout_tokens(c, kind)
    if c.rollout.cache_tokens:
        cached_tokens = min(cached_tokens, c.rollout.cache_tokens)
    return {
        "copy that decodes": copy_bytes,
        "keys and values": cached_tokens * _token_bytes(c, spec) / local_devices,
        # If `tensor` spans hosts, the rows of all of them share its devices.
        "next tokens' logits": rows
        * spec.vocab_size
        * FLOAT32
        * c.mesh.tensor
        / local_devices,
    }


def _update_memory(c, kind, spec, num_devices):
    """Return {what: bytes} of an update: gradients and stored activations."""
    size = BYTES[c.model.dtype]
    _, tokens = context_of(c, kind)
    shares, micro_batch = num_devices // c.mesh.tensor, c[kind].micro_batch
    rows = min(piece_rows(micro_batch, tokens, shares), micro_batch)
    rows = max(rows / shares, 1)
    layers = 1 if c.model.remat else spec.num_layers
    heads, kv_heads = (n / c.mesh.tensor for n in (spec.num_heads, spec.num_kv_heads))
    scores = heads * block_size(tokens) * tokens * FLOAT32 * SCORE_COPIES
    # The outputs of a layer's matrices, and those of attention.
    outputs = 2 * spec.width + 2 * spec.mlp_width / c.mesh.tensor
    layer_bytes = tokens * (outputs + 2 * spec.head_dim * (heads + kv_heads)) * size
    vocab_shards = c.mesh.tensor if spec.vocab_size % c.mesh.tensor == 0 else 1
    chunk_logits = c.model.logit_chunk * spec.vocab_size / vocab_shards
    return {
        # The sum so far, and that of a piece, or of a micro-batch without pieces.
        "gradients": 2 * FLOAT32 * _num_trained(c, spec),
        "attention scores": rows * scores,
        "layers' inputs": rows * spec.num_layers * tokens * spec.width * size,
        "inside of a layer": rows * layers * layer_bytes,
        "logits": 2 * FLOAT32 * chunk_logits,
    }
