"""Measure the time and memory of updates, and the time of GRPO steps."""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rsearch.bench.child import Repetition
from rsearch.bench.comparison import (
    OURS,
    Bench,
    Measurement,
    Subject,
    compare,
    find_python,
    make_case_rows,
    median_of,
    with_bound,
)
from rsearch.bench.networks import (
    SHAPES,
    load_network,
    model_directory,
    parse_cases,
    step_work,
    update_work,
    vocabulary_spec,
)
from rsearch.bench.rollout import one_turn_engine
from rsearch.bench.workload import (
    MAX_GRAD_NORM,
    REWARD_DIVISOR,
    multiply_in_full,
    prompt_rows,
    token_rows,
)
from rsearch.learn import objectives
from rsearch.learn.advantages import with_advantages
from rsearch.learn.batch import Batch, pack, to_micro_batches
from rsearch.learn.optimizer import make_optimizer
from rsearch.learn.packing import pack_micro_batches
from rsearch.learn.train_state import create_state
from rsearch.learn.update import make_policy_scorer, make_policy_update, put
from rsearch.models.decoder import Decoder, init_params
from rsearch.models.hf.families import read_spec
from rsearch.models.sharding import make_mesh
from rsearch.models.spec import DecoderSpec
from rsearch.types import Question

FLAGS = {
    "model": ("", "Hugging Face directory; random weights of --shape if not given"),
    "shape": ("smollm2", f"shape of random weights: {', '.join(SHAPES)}"),
    "dtype": (
        "float32",
        "dtype of computation in update and logits: float32 or bfloat16",
    ),
    "cases": ("update,logits,grpo", "cases to measure"),
    "rows": (8, "rows of an update"),
    "tokens": (1024, "tokens of each row"),
    "learnt": (1.0, "share of a row's tokens, from its end, that are trained on"),
    "micro_batch": (1, "rows that go through the network together"),
    "peer_micro_batch": (8, "the same for the peer, which is measured with 1 as well"),
    "logit_chunk": (512, "tokens whose logits exist at the same time"),
    "vocabulary": (152064, "vocabulary size of a small network, in case logits"),
    "vocabulary_tokens": (2048, "tokens of its only row"),
    "vocabulary_chunk": (256, "tokens whose logits exist at the same time"),
    "grpo_shape": ("quickstart", "shape of the network, in case grpo"),
    "questions": (8, "questions of a GRPO step"),
    "group": (8, "rollouts of each question"),
    "prompt_tokens": (32, "prompt tokens of each question"),
    "new_tokens": (64, "tokens that each rollout writes"),
    "tunix_python": ("", "interpreter with google-tunix, if this one lacks it"),
}
CASES = ("update", "logits", "grpo")
PEER = "torch"
ADAMW = dict(lr=1e-5, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)
KL_COEF = 0.04  # google-tunix's


def measure(
    start: Callable[[], Bench],
    *,
    model: str,
    shape: str,
    dtype: str,
    cases: str,
    **sizes,
) -> list[Measurement]:
    """Return the rows of the chosen cases; see FLAGS.

    Args:
        start: probes the machine.

    Raises:
        ValueError: an unknown case or shape, a dtype that is not measured, rows that
            are not a multiple of a micro-batch, or another number out of range.
    """
    case_names = parse_cases(
        cases,
        CASES,
        dtype=dtype,
        model=model,
        shape=shape,
        grpo_shape=sizes["grpo_shape"],
    )
    if sizes["rows"] % min(sizes["micro_batch"], sizes["rows"]):
        raise ValueError(
            f"--rows={sizes['rows']}: must be a multiple of "
            f"--micro_batch={sizes['micro_batch']}"
        )
    for name in ("tokens", "vocabulary_tokens"):
        if sizes[name] < 2:
            raise ValueError(
                f"--{name}={sizes[name]}, expected at least 2: a row's first token is "
                "not trained on"
            )
    if not 0 < sizes["learnt"] <= 1:
        raise ValueError(f"--learnt={sizes['learnt']}: must be above 0 and at most 1")
    sizes["tunix_python"] = find_python("tunix_python", sizes["tunix_python"])
    rows, bench = [], start()
    if "update" in case_names:
        with model_directory(model, SHAPES[shape]) as directory:
            rows += _measure_update(bench, directory, dtype, sizes)
    if "logits" in case_names:
        spec = vocabulary_spec(sizes["vocabulary"])
        with model_directory("", spec) as directory:
            rows += _measure_logits(bench, directory, dtype, sizes)
    if "grpo" in case_names:
        rows += _measure_step(bench, sizes)
    return rows


def _measure_update(bench: Bench, model, dtype, sizes) -> list[Measurement]:
    """Return tokens a second of an update, measuring one subject after another."""
    num_rows = sizes["rows"]
    num_tokens = sizes["tokens"]
    settings = {
        "model": model,
        "dtype": dtype,
        "num_rows": num_rows,
        "num_tokens": num_tokens,
        "num_learnt": max(1, min(num_tokens - 1, round(sizes["learnt"] * num_tokens))),
        "micro_batch": min(sizes["micro_batch"], num_rows),
    }
    chunk = {"logit_chunk": sizes["logit_chunk"]}
    subjects = {OURS: Subject("rsearch.bench.train", settings | chunk, "make_update")}
    for micro_batch in sorted({min(sizes["peer_micro_batch"], num_rows), 1}):
        subjects[f"{PEER}, {micro_batch} at once"] = Subject(
            "rsearch.bench.peers",
            settings | {"micro_batch": micro_batch},
            "make_update",
        )
    results = compare(subjects, bench.repeats, one_at_a_time=True)
    num_learnt = settings["num_learnt"]
    case = f"update, {num_rows} x {num_tokens} tokens"
    if num_learnt < num_tokens - 1:
        case += f", {num_learnt} learnt"
    work = update_work(read_spec(model), num_rows, num_tokens, num_learnt)

    def bound(row, runs):
        seconds = median_of(runs, "seconds")
        return with_bound(row, bench.machine, seconds, work, dtype=dtype)

    counts = ("loss", "grad_norm")
    return _update_rows(case, results, num_rows * num_tokens, counts, bound=bound)


def _measure_logits(bench: Bench, model, dtype, sizes) -> list[Measurement]:
    """Return the speed and memory of updating a network that is mostly vocabulary."""
    tokens = sizes["vocabulary_tokens"]
    settings = {
        "model": model,
        "dtype": dtype,
        "num_rows": 1,
        "num_tokens": tokens,
        "micro_batch": 1,
        "logit_chunk": min(sizes["vocabulary_chunk"], tokens),
    }
    module = "rsearch.bench.train"
    subjects = {
        OURS: Subject(module, settings, "make_update"),
        "all logits at once": Subject(module, settings, "make_full_logits_update"),
    }
    results = compare(subjects, bench.repeats, one_at_a_time=True)
    case = f"update, {sizes['vocabulary']} ids, {tokens} tokens"
    return _update_rows(case, results, tokens, ("loss",))


def _measure_step(bench: Bench, sizes) -> list[Measurement]:
    """Return seconds of a small Llama's GRPO steps, compared with google-tunix."""
    spec = SHAPES[sizes["grpo_shape"]]
    step_sizes = {
        "num_questions": sizes["questions"],
        "group_size": sizes["group"],
        "num_prompt": sizes["prompt_tokens"],
        "num_new": sizes["new_tokens"],
    }
    settings = {"spec": dataclasses.asdict(spec), **step_sizes}
    # A micro-batch counts questions in google-tunix, and rollouts in this package.
    num_rollouts = sizes["questions"] * sizes["group"]
    subjects = {
        OURS: Subject(
            "rsearch.bench.train", settings | {"micro_batch": num_rollouts}, "make_step"
        ),
        "google-tunix": Subject(
            "rsearch.bench.peers",
            settings | {"micro_batch": sizes["questions"]},
            "make_step",
            python=sizes["tunix_python"],
        ),
    }
    results = compare(subjects, bench.repeats)
    case = "GRPO step, {questions} x {group} rollouts".format(**sizes)
    rollout_seconds = median_of(results[OURS], "rollout seconds")
    phases = step_work(spec, **step_sizes)
    return make_case_rows(
        case,
        "s",
        results,
        lambda run: run["seconds"],
        more_is_better=False,
        counts=lambda name, _: {"rollouts": rollout_seconds} if name == OURS else {},
        bound=lambda row, _: with_bound(row, bench.machine, row.value, *phases),
        has_peak=False,
    )


def _update_rows(
    case, results, num_tokens, count_names, **settings
) -> list[Measurement]:
    """Return rows of tokens a second and peak memory, one for each subject."""
    our_peak = median_of(results[OURS], "peak_bytes")

    def counts(subject, runs):
        counts = {name: runs[0][name] for name in count_names}
        if subject == OURS:
            return counts
        share = our_peak / median_of(runs, "peak_bytes")
        return {"rsearch's share of the memory": share} | counts

    return make_case_rows(
        case,
        "tokens/s",
        results,
        lambda run: num_tokens / run["seconds"],
        counts=counts,
        **settings,
    )


def _make_adamw():
    """Return AdamW with the peers' settings and a constant learning rate."""
    return make_optimizer(
        **ADAMW, max_grad_norm=MAX_GRAD_NORM, warmup_steps=0, decay_steps=0
    )


def _batch(tokens, num_learnt) -> Batch:
    """Return a batch to imitate the last `num_learnt` tokens of its rows."""
    shape = tokens.shape
    is_learnt = np.ones(shape, bool) & (np.arange(shape[1]) >= shape[1] - num_learnt)
    return Batch(
        tokens=tokens,
        from_policy=is_learnt,
        in_response=is_learnt,
        behavior_logp=np.zeros(shape, np.float32),
        reference_logp=np.zeros(shape, np.float32),
        reward=np.zeros(shape[0], np.float32),
        is_signal=np.ones(shape[0], bool),
        advantage=np.zeros(shape, np.float32),
    )


def make_update(
    *,
    model: str,
    num_rows: int,
    num_tokens: int,
    micro_batch: int,
    logit_chunk: int,
    dtype: str,
    num_learnt: int = 0,
) -> Repetition:
    """Prepare an AdamW update that raises the likelihood of B rows of T tokens.

    Args:
        model: Hugging Face directory.
        num_rows, num_tokens: B and T.
        micro_batch: rows that go through the network together.
        logit_chunk: tokens whose logits exist at the same time.
        dtype: dtype of computation; parameters and moments are float32.
        num_learnt: tokens at the end of a row to train on; 0 = all but its first.
    """
    network, params, mesh = load_network(model, dtype)
    optimizer = _make_adamw()
    update = make_policy_update(
        network,
        optimizer,
        mesh,
        loss=objectives.imitation_loss,
        loss_mean="token",
        chunk_tokens=logit_chunk,
    )
    state = create_state(params, optimizer, mesh)
    del params
    tokens = token_rows(num_rows, num_tokens, network.spec.vocab_size)
    batch = put(
        to_micro_batches(_batch(tokens, num_learnt or num_tokens - 1), micro_batch),
        mesh,
    )

    def repeat():
        nonlocal state
        start_time = time.perf_counter()
        state, metrics = update(state, None, batch)
        loss = float(metrics["loss"])
        jax.block_until_ready(state)
        return {
            "seconds": time.perf_counter() - start_time,
            "loss": loss,
            "grad_norm": float(metrics["grad_norm"]),
        }

    return repeat


def make_full_logits_update(
    *, model: str, num_rows: int, num_tokens: int, dtype: str, **_
) -> Repetition:
    """Prepare the same update with all [B, T, V] logits and their softmax in memory."""
    network, params, mesh = load_network(model, dtype)
    optimizer = _make_adamw()
    state = create_state(params, optimizer, mesh)
    del params
    tokens = jnp.asarray(token_rows(num_rows, num_tokens, network.spec.vocab_size))

    def loss(params):
        variables = {"params": params}
        positions = jnp.broadcast_to(jnp.arange(num_tokens - 1), tokens[:, 1:].shape)
        hidden, _ = network.apply(variables, tokens[:, :-1], positions)
        logits = network.apply(variables, hidden, method="logits")
        logp = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))

    def update(state):
        value, grads = jax.value_and_grad(loss)(state.params)
        changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, changes)
        return state._replace(params=params, opt_state=opt_state), value

    update = jax.jit(update, donate_argnums=0)

    def repeat():
        nonlocal state
        start_time = time.perf_counter()
        state, value = update(state)
        value = float(value)
        jax.block_until_ready(state)
        return {"seconds": time.perf_counter() - start_time, "loss": value}

    return repeat


def make_step(
    *,
    spec: dict,
    num_questions: int,
    group_size: int,
    num_prompt: int,
    num_new: int,
    micro_batch: int,
) -> Repetition:
    """Prepare GRPO steps: rollouts, the reference model's scores, an update."""
    multiply_in_full()
    network = Decoder(DecoderSpec(**spec))
    mesh = make_mesh(devices=jax.devices()[:1])
    params = jax.jit(functools.partial(init_params, network))(jax.random.key(0))
    roll_out = one_turn_engine(
        network,
        mesh,
        num_rows=num_questions * group_size,
        group_size=group_size,
        num_prompt=num_prompt,
        num_new=num_new,
    )
    optimizer = _make_adamw()
    loss = objectives.policy_loss(
        clip_low=0.2, clip_high=0.2, kl_coef=KL_COEF, kl_kind="k3", entropy_coef=0.0
    )
    score = make_policy_scorer(network, mesh)
    update = make_policy_update(network, optimizer, mesh, loss=loss, loss_mean="token")
    state = create_state(params, optimizer, mesh)
    step = 0

    def repeat():
        nonlocal state, step
        rows = prompt_rows(num_questions, num_prompt, network.spec.vocab_size, step)
        roll_out.prompt = lambda question: rows[int(question.id)]
        questions = [Question(str(i), "", ("",)) for i in range(num_questions)]
        start_time = time.perf_counter()
        key = jax.random.key(step)
        groups = roll_out(roll_out.place_params(state.params), questions, key)
        rollout_end = time.perf_counter()
        lengths = [[len(r.segments[-1].text) for r in g.rollouts] for g in groups]
        rewards = np.array(lengths) % REWARD_DIVISOR / REWARD_DIVISOR
        batch = pack(groups, rewards, num_prompt + num_new)
        batch = put(pack_micro_batches(to_micro_batches(batch, micro_batch)), mesh)
        batch = batch._replace(reference_logp=score(params, None, batch))
        batch = with_advantages(
            batch, algorithm="grpo", group_size=group_size, normalize_std=True
        )
        state, _ = update(state, None, batch)
        jax.block_until_ready(state)
        end_time = time.perf_counter()
        step += 1
        return {
            "seconds": end_time - start_time,
            "rollout seconds": rollout_end - start_time,
        }

    return repeat
