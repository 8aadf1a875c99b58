"""Small models of the embedded world, trained once and cached: "world:base".

A model is trained the first time that a run names it. It is cached in a directory whose
name contains a digest of everything that determines the model.
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rsearch.learn.batch import Batch, pack_segments, to_micro_batches
from rsearch.learn.objectives import imitation_loss
from rsearch.learn.optimizer import make_optimizer
from rsearch.learn.train_state import create_state
from rsearch.learn.update import make_policy_update, put
from rsearch.models.decoder import Decoder, init_params
from rsearch.models.hf.checkpoint import check_export, export
from rsearch.models.hf.directory import find_model
from rsearch.models.sharding import make_mesh
from rsearch.models.small_tokenizer import ROLES
from rsearch.models.spec import DecoderSpec
from rsearch.models.tokenizer import Tokenizer
from rsearch.protocols import plain
from rsearch.retrieval.encoder import HashedNgrams
from rsearch.retrieval.engine import engine_in_memory
from rsearch.rollout.conversation import Host, Limits
from rsearch.rollout.replay import replay
from rsearch.runtime import console, files
from rsearch.runtime.digests import CACHE, find_cache
from rsearch.types import SearchFn, Segment, Source, unsampled_segment
from rsearch.world import reading
from rsearch.world import texts as world_texts
from rsearch.world.world import WORLD, make_world

MODEL_BYTES = 1 << 23  # most disk space that a cached model takes
MAX_CONTEXT = 2048  # context length that a model declares, in tokens
LENGTHS = (40, 64, 96, 144, 208, 320)  # tokens per row; the first that fits is used
NUM_SAMPLED = 200  # number of conversations whose tokens are part of a model's digest
SECONDS_BETWEEN_LINES = 15.0


@dataclasses.dataclass(frozen=True)
class Pretraining:
    """The shape and training of a model.

    Attributes:
        shares: amounts of the kinds of text that the model reads.
        width, num_layers, num_heads, num_kv_heads, head_dim, mlp_width: its shape.
        steps: number of optimizer steps.
        step_tokens: tokens per step, including padding.
        lr: peak learning rate; it falls linearly to a tenth.
        seed: added to the world's seed.
    """

    shares: reading.Shares
    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    mlp_width: int = 320
    steps: int = 4000
    step_tokens: int = 1024
    lr: float = 2e-3
    seed: int = 0


KNOWLEDGE = dict(facts=60, comparisons=5000, orderings=2000, lookups=4000, direct=1)
MODELS = {
    "base": Pretraining(
        reading.Shares(
            flawed=0.58, guessed=0.15, recalled=0.4, recalling=3, **KNOWLEDGE
        )
    ),
    "expert": Pretraining(reading.Shares(recalled=0.5, chats=1, **KNOWLEDGE), seed=1),
    "judge": Pretraining(
        reading.Shares(judged=3, comparisons=2000, orderings=500),
        width=96,
        num_heads=3,
        num_kv_heads=3,
        seed=2,
        steps=1800,
    ),
}


def find_source(c, source: str) -> pathlib.Path:
    """Return the directory of a model of the embedded world, or one from `find_model`.

    Args:
        c: the configuration, which has the seed and the world of a "world:<name>".
        source: "world:<name>", a directory, or a hub id.

    Raises:
        ValueError: there is no such model.
    """
    if not source.startswith(f"{WORLD}:"):
        return find_model(source)
    name = source.removeprefix(f"{WORLD}:")
    return find_world_model(name, world_settings=dict(c.world), seed=c.seed)


def find_world_model(
    name: str,
    *,
    world_settings: Mapping[str, object],
    seed: int,
    log: Callable[[str], None] = console.note,
    cache: str | os.PathLike | None = None,
    pretraining: Pretraining | None = None,
) -> pathlib.Path:
    """Return the directory of a small model of the world; train it if it is missing.

    Args:
        name: a key of MODELS.
        world_settings: arguments of `make_world`, except the seed.
        seed: seed of the world and of the training.
        log: called with a line of progress now and then while the model is made.
        cache: directory of all such models; by default $RSEARCH_CACHE/world, or else
            ~/.cache/rsearch/world.
        pretraining: replaces the settings in MODELS.

    Raises:
        ValueError: there is no model of this name.
    """
    if name not in MODELS:
        raise ValueError(
            f"'{WORLD}:{name}': the world's models are {', '.join(MODELS)}"
        )
    pretraining = pretraining or MODELS[name]
    world = make_world(seed=seed, **world_settings)
    tokenizer = reading.world_tokenizer(world)
    search = engine_in_memory(world.passages, HashedNgrams(512), top_k=1)
    items = reading.reading(
        world, pretraining.shares, search, seed=seed + pretraining.seed
    )
    settings = repr((pretraining, sorted(world_settings.items()), seed, items))
    digest = hashlib.sha256(f"{tokenizer.fingerprint} {settings}".encode())
    # Code determines how conversations become tokens, so the tokens of some of them
    # show whether the code has changed.
    for row in make_rows(items[:NUM_SAMPLED], tokenizer, search):
        for segment in row:
            digest.update(bytes([segment.source]) + segment.token_ids.tobytes())
    folder = models_directory() if cache is None else pathlib.Path(cache)
    directory = folder / f"{name}-{digest.hexdigest()[:16]}"
    if directory.is_dir() and _is_intact(directory, log):
        return directory
    _check_writable(folder)
    with _lock_model(directory, log):
        if directory.is_dir() and _is_intact(directory, log):  # made in the meantime
            return directory
        log(f"{WORLD}:{name}: made once and kept in {directory}")
        rows = make_rows(items, tokenizer, search)
        params, spec = _train(name, pretraining, rows, tokenizer, seed, log)
        _write_model(directory, params, spec, tokenizer)
    return directory


def models_directory() -> pathlib.Path:
    """Return the directory of all such models, which may not exist yet.

    Raises:
        ValueError: no variable names it, and the user has no home directory.
    """
    try:
        return find_cache() / WORLD
    except RuntimeError:  # no HOME, and no entry in the user database
        value = os.environ.get(CACHE, "")
        raise ValueError(
            f"{CACHE}={value!r}: the user has no home directory; name a directory for "
            f"the models of {WORLD}, {CACHE}=/DIR"
        ) from None


def _check_writable(folder):
    """Refuse a cache that could not be written after minutes of training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(MODEL_BYTES))
    except OSError as error:
        raise ValueError(
            f"{CACHE}={os.environ.get(CACHE, '')!r}: {folder} cannot be written: "
            f"{error.strerror}; name another directory, {CACHE}=/DIR"
        ) from None


@contextlib.contextmanager
def _lock_model(directory, log):
    """Let one process at a time make a model, if the file system supports locks."""
    path = directory.with_name(f".{directory.name}.lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # on network file systems without locks
            if not stack.enter_context(files.locked(path)):
                log(f"another process is making {directory.name}: waiting for it")
                stack.enter_context(files.locked(path, waits=True))
        yield
        path.unlink(missing_ok=True)


def _is_intact(directory, log):
    """Return whether a cached model is as it was written; rename a damaged one."""
    try:
        check_export(directory)
    except ValueError as error:
        damaged = directory.with_name(
            f"{directory.name}.damaged-{uuid.uuid4().hex[:8]}"
        )
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.rename(directory, damaged)
        log(f"{error}; moved to {damaged}, and made again")
        return False
    return True


def _write_model(directory, params, spec, tokenizer):
    """Write the model, or keep one that another process has written meanwhile."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}")
    try:
        export(unfinished, params, spec, tokenizer)
        with contextlib.suppress(OSError):
            os.rename(unfinished, directory)
            files.sync_directory(directory.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    assert directory.is_dir()


def make_rows(
    items: Sequence, tokenizer: Tokenizer, search: SearchFn
) -> list[list[Segment]]:
    """Tokenize dialogues, chats and texts as [rows] lists of segments."""
    limits = Limits(8, MAX_CONTEXT, MAX_CONTEXT, MAX_CONTEXT)
    hosts = {}
    for name, protocol in world_texts.WORLD_PROTOCOLS.items():
        message = None if protocol.invalid_message is None else world_texts.INVALID
        world_protocol = plain.reword(
            protocol, user=world_texts.instruction(name), invalid_message=message
        )
        hosts[name] = Host(tokenizer, world_protocol, search, limits)
    rows = []
    for item in items:
        if isinstance(item, reading.Dialogue):
            rollout = replay(
                hosts[item.protocol],
                item.question,
                item.turns,
                observations=item.observations,
            )
            rows.append(rollout.segments)
        elif isinstance(item, reading.Chat):
            reply = tokenizer.encode(f" {item.reply}")
            reply = np.append(reply, np.int32(tokenizer.eos_ids[0]))
            prompt = tokenizer.encode_prompt(item.messages)
            context = unsampled_segment(Source.PROMPT, prompt, "")
            rows.append([context, unsampled_segment(Source.POLICY, reply, "")])
        else:
            row = []
            for context, target in item.pieces:
                for source, text in (Source.PROMPT, context), (Source.POLICY, target):
                    row.append(unsampled_segment(source, tokenizer.encode(text), ""))
            rows.append(row)
    return rows


def _train(name, pretraining: Pretraining, rows, tokenizer, seed, log):
    """Train a model on the rows; return its parameters and shape."""
    spec = DecoderSpec(
        vocab_size=tokenizer.vocab_size,
        width=pretraining.width,
        num_layers=pretraining.num_layers,
        num_heads=pretraining.num_heads,
        num_kv_heads=pretraining.num_kv_heads,
        head_dim=pretraining.head_dim,
        mlp_width=pretraining.mlp_width,
        tie_embeddings=True,
        max_context=MAX_CONTEXT,
    )
    model = Decoder(spec, dtype=jnp.float32)
    mesh = make_mesh(devices=jax.local_devices())
    optimizer = make_optimizer(
        lr=pretraining.lr,
        warmup_steps=20,
        decay_steps=pretraining.steps,
        b1=0.9,
        b2=0.98,
        eps=1e-8,
        weight_decay=0.01,
        max_grad_norm=1.0,
    )
    update = make_policy_update(
        model, optimizer, mesh, loss=imitation_loss, loss_mean="token"
    )
    key = jax.random.key(seed + pretraining.seed)
    params = jax.jit(lambda key: init_params(model, key))(key)
    params = params | {"embedding": align_spaced(params["embedding"], tokenizer)}
    state = create_state(params, optimizer, mesh)
    log(
        f"{WORLD}:{name}: {spec.num_params / 1e6:.2g} M parameters, {len(rows):,} rows "
        f"of {sum(map(row_length, rows)) / len(rows):.0f} tokens"
    )
    start_time = report_time = time.monotonic()
    batches = make_batches(rows, pretraining, seed, jax.local_device_count())
    for step in range(pretraining.steps):
        state, metrics = update(state, None, put(next(batches), mesh))
        if (
            time.monotonic() - report_time > SECONDS_BETWEEN_LINES
            or step + 1 == pretraining.steps
        ):
            report_time = time.monotonic()
            log(
                f"{WORLD}:{name}: step {step + 1}/{pretraining.steps}, loss "
                f"{float(metrics['loss']):.3f} ({report_time - start_time:.0f} s)"
            )
    return state.params, spec


def align_spaced(embedding: jax.Array, tokenizer: Tokenizer) -> jax.Array:
    """Give each word similar embeddings with and without a space before it.

    The two differ by one vector, which is the same for all words. A model reads
    " Altdorf" and must write "Altdorf" after a quote; a small model would have to learn
    that for each word.
    """
    ids = {token: i for i, token in enumerate(tokenizer.token_bytes)}
    pairs = [(i, ids[b" " + t]) for t, i in ids.items() if b" " + t in ids and t]
    bare_ids, spaced_ids = np.array(pairs).T
    # The row of a role that no prompt of the world has.
    unused_id = ROLES.index("<|system|>")
    return embedding.at[bare_ids].set(
        embedding[spaced_ids] + embedding[unused_id][None]
    )


def make_batches(
    rows: Sequence[Sequence[Segment]],
    pretraining: Pretraining,
    seed: int,
    multiple: int,
) -> Iterator[Batch]:
    """Yield batches of rows of similar length, endlessly.

    Each row comes once before any comes again, except in batches that need filling.
    """
    rng = np.random.default_rng([seed, 6])
    by_length = {}
    for row in rows:
        lengths = [n for n in LENGTHS if n >= row_length(row)]
        by_length.setdefault(lengths[0], []).append(row)
    while True:
        batches = []
        for length, rows_of_length in sorted(by_length.items()):
            size = max(1, pretraining.step_tokens // length // multiple) * multiple
            order = rng.permutation(len(rows_of_length))
            # Repeat rows to fill the last batch.
            order = np.resize(order, -(-len(rows_of_length) // size) * size)
            batches += [
                (length, order[i : i + size]) for i in range(0, len(order), size)
            ]
        for i in rng.permutation(len(batches)):
            length, indices = batches[i]
            batch = pack_segments([by_length[length][j] for j in indices], length)
            yield to_micro_batches(batch, len(indices))


def row_length(row: Sequence[Segment]) -> int:
    """Return the number of tokens of a row."""
    return sum(len(segment.token_ids) for segment in row)
