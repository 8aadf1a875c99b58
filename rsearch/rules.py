"""What a configuration may hold: a range for each field, and what must fit together.

`validate` runs before anything compiles. A field without a rule is free text.
"""

import math

STAGES = ("sft", "rl")
METHODS = ("protocol", "direct", "rag")
WORDS = {  # fields of one word -> the words there are
    "model.dtype": ("float32", "bfloat16"),
    "data.on_bad": ("raise", "skip"),
    "rl.kl_kind": ("k1", "k2", "k3"),
    "rl.kl_place": ("loss", "reward"),
    "rl.loss_mean": ("token", "sequence"),
    "rl.behavior": ("sampled", "scored"),
    "eval.normalize": ("squad", "r1_searcher"),
    "retrieval.family": ("minilm", "e5", "bge"),
}


def _at_least(low):
    return lambda x: x >= low, f"a finite number >= {low}"


def _above(low):
    return lambda x: x > low, f"a finite number > {low}"


def _between(low, high):
    return lambda x: low <= x <= high, f"a number from {low} to {high}"


def _inside(low, high):
    return lambda x: low < x < high, f"a number between {low} and {high}, both excluded"


def _one_of(words):
    return lambda x: x in words, "one of " + ", ".join(map(repr, words))


def _some_of(words):
    def is_right(x):
        return 0 < len(x) == len(set(x)) and set(x) <= set(words)

    return is_right, "each once, some of " + ", ".join(map(repr, words))


RULES = {  # field -> (predicate, what would be right)
    "seed": _between(0, 2**31 - 1),
    "stages": _some_of(STAGES),
    "model.num_layers": _at_least(1),
    "model.width": _at_least(1),
    "model.num_heads": _at_least(1),
    "model.num_kv_heads": _at_least(1),
    "model.head_dim": (lambda x: x >= 2 and x % 2 == 0, "an even number >= 2"),
    "model.mlp_width": _at_least(1),
    "model.vocab_size": _at_least(0),
    "model.rope_theta": _above(0),
    "protocol.instruction": (
        lambda x: x is None or "{question}" in x,
        "a text that holds {question}",
    ),
    "protocol.direct": (
        lambda x: x is None or "{question}" in x,
        "a text that holds {question}",
    ),
    "protocol.rag": (
        lambda x: x is None or ("{question}" in x and "{passages}" in x),
        "a text that holds {passages} and {question}",
    ),
    "model.logit_chunk": _at_least(1),
    "data.max_train": _at_least(0),
    "data.max_dev": _at_least(0),
    "world.people": _at_least(1),
    "world.films": _at_least(1),
    "world.companies": _at_least(1),
    "world.cities": _at_least(1),
    "world.train_questions": _at_least(1),
    "world.dev_questions": _at_least(1),
    "retrieval.top_k": _at_least(1),
    "retrieval.cache_size": _at_least(0),
    "retrieval.hashed_dim": _at_least(1),
    "rollout.group_size": _at_least(1),
    "rollout.max_searches": _at_least(0),
    "rollout.max_turn_tokens": _at_least(1),
    "rollout.max_observation_tokens": _at_least(1),
    "rollout.max_prompt_tokens": _at_least(1),
    "rollout.context_tokens": _at_least(0),
    "rollout.temperature": _above(0),
    "rollout.top_p": (lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "rollout.slots": _at_least(1),
    "rollout.extend_chunk": _at_least(1),
    "sft.steps": _at_least(0),
    "sft.batch_size": _at_least(1),
    "sft.micro_batch": _at_least(1),
    "sft.sequence_tokens": _at_least(2),
    "sft.lr": _at_least(0),
    "sft.warmup_steps": _at_least(0),
    "sft.repeats": _at_least(1),
    "sft.baseline_share": _between(0, 1),
    "sft.flawed_share": _between(0, 1),
    "sft.guess_share": _between(0, 1),
    "rl.steps": _at_least(0),
    "rl.questions_per_step": _at_least(1),
    "rl.updates_per_step": _at_least(1),
    "rl.micro_batch": _at_least(1),
    "rl.lr": _at_least(0),
    "rl.warmup_steps": _at_least(0),
    "rl.clip_low": _inside(0, 1),
    "rl.clip_high": _above(0),
    "rl.kl_coef": _at_least(0),
    "rl.std_eps": _above(0),
    "rl.entropy_coef": _at_least(0),
    "optim.b1": (lambda x: 0 <= x < 1, "a number from 0, below 1"),
    "optim.b2": (lambda x: 0 <= x < 1, "a number from 0, below 1"),
    "optim.eps": _above(0),
    "optim.weight_decay": _at_least(0),
    "optim.max_grad_norm": _above(0),
    "reward": (lambda x: len(x) > 0, "at least one term with its settings"),
    "judge.slots": _at_least(1),
    "judge.max_prompt_tokens": _at_least(1),
    "judge.max_reply_tokens": _at_least(1),
    "mesh.data": (
        lambda x: x == -1 or x >= 1,
        "a number >= 1, or -1 for all remaining",
    ),
    "mesh.fsdp": _at_least(1),
    "mesh.tensor": _at_least(1),
    "checkpoint.sft_steps": _at_least(1),
    "checkpoint.rl_steps": _at_least(1),
    "checkpoint.keep": _at_least(1),
    "eval.every_steps": _at_least(0),
    "eval.methods": _some_of(METHODS),
    "eval.max_questions": _at_least(0),
    "eval.examples": _at_least(0),
    "log_every": _at_least(1),
    **{name: _one_of(words) for name, words in WORDS.items()},
}


def validate(config, *, num_devices=None):
    """Refuses a configuration that could not run as written.

    Args:
        config: a configuration with the fields of configs/base.py.
        num_devices: how many devices there are; None leaves the mesh unchecked.

    Raises:
        ValueError: field, value and what would be right; for fields that do not fit
            together, with the arithmetic.
    """
    for name, value in _leaves(config):
        if isinstance(value, float) and not math.isfinite(value):
            right = RULES[name][1] if name in RULES else "a finite number"
            raise ValueError(f"config.{name} = {value!r}: must be {right}")
    for name, (is_right, right) in RULES.items():
        value = config[name]
        if not is_right(value):
            shown = value.to_dict() if hasattr(value, "to_dict") else value
            raise ValueError(f"config.{name} = {shown!r}: must be {right}")
    for check in CROSS_CHECKS:
        check(config)
    if num_devices is not None:
        _check_mesh(config, num_devices)


def _leaves(config, prefix=""):
    for key, value in config.items():
        if hasattr(value, "items"):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_sources(c):
    if not c.tokenizer.source and not c.model.source:
        raise ValueError(
            "config.tokenizer.source and config.model.source are both empty: name a "
            "tokenizer ('world' is the embedded one)"
        )


def _check_world(c):
    if c.model.source and c.tokenizer.source == "world":
        raise ValueError(
            f"config.tokenizer.source = 'world' does not belong to "
            f"config.model.source = {c.model.source!r}; '' takes the model's own"
        )
    if c.retrieval.index and c.retrieval.corpus == "world":
        raise ValueError(
            f"config.retrieval.index = {c.retrieval.index!r} is no index of "
            "config.retrieval.corpus = 'world'; '' takes the index's own corpus"
        )
    named = {"data.train": c.data.train, "data.dev": c.data.dev}
    if "sft" in c.stages:
        named["sft.demonstrations"] = c.sft.demonstrations
    for name, value in named.items():
        if value.partition(":")[0] == "world" and c.retrieval.corpus != "world":
            raise ValueError(
                f"config.{name} = {value!r} asks about a world that "
                f"config.retrieval.corpus = {c.retrieval.corpus!r} does not hold"
            )


def _check_nucleus(c):
    if "rl" in c.stages and c.rollout.top_p < 1 and c.rl.behavior == "sampled":
        raise ValueError(
            f"config.rollout.top_p = {c.rollout.top_p} needs config.rl.behavior = "
            "'scored': log-probabilities within the nucleus do not compare with the "
            "trainer's, which are over the whole vocabulary"
        )


def _check_shape(c):
    if c.model.source:
        return
    heads, kv_heads = c.model.num_heads, c.model.num_kv_heads
    if heads % kv_heads:
        raise ValueError(
            f"config.model.num_heads = {heads} is not a multiple of "
            f"config.model.num_kv_heads = {kv_heads}"
        )
    if kv_heads % c.mesh.tensor:
        raise ValueError(
            f"config.model.num_kv_heads = {kv_heads} is not a multiple of "
            f"config.mesh.tensor = {c.mesh.tensor}"
        )


def _check_context(c):
    r = c.rollout
    needed = (
        r.max_prompt_tokens
        + (r.max_searches + 1) * r.max_turn_tokens
        + r.max_searches * r.max_observation_tokens
    )
    if 0 < r.context_tokens < needed:
        raise ValueError(
            f"config.rollout.context_tokens = {r.context_tokens} is too small: prompt "
            f"{r.max_prompt_tokens} + {r.max_searches + 1} turns x {r.max_turn_tokens} "
            f"+ {r.max_searches} observations x {r.max_observation_tokens} = {needed} "
            f"tokens, and the tags around observations; 0 has it computed"
        )


def _check_groups(c):
    if "rl" in c.stages and c.rollout.group_size < 2:
        raise ValueError(
            f"config.rollout.group_size = {c.rollout.group_size}: must be >= 2, since "
            "a rollout's advantage is its reward relative to the others of its group"
        )
    if c.rollout.slots % c.rollout.group_size:
        raise ValueError(
            f"config.rollout.slots = {c.rollout.slots} is not a multiple of "
            f"config.rollout.group_size = {c.rollout.group_size}: "
            f"{c.rollout.slots} % {c.rollout.group_size} = "
            f"{c.rollout.slots % c.rollout.group_size}"
        )


def _check_rl_batch(c):
    if "rl" not in c.stages:
        return
    rows = c.rl.questions_per_step * c.rollout.group_size
    part = c.rl.updates_per_step * c.rl.micro_batch
    if rows % part:
        raise ValueError(
            f"config.rl.micro_batch = {c.rl.micro_batch} does not fit: "
            f"{c.rl.questions_per_step} questions x {c.rollout.group_size} rollouts = "
            f"{rows} rows, which {c.rl.updates_per_step} updates x micro-batches of "
            f"{c.rl.micro_batch} = {part} rows do not divide (remainder {rows % part})"
        )
    if c.rl.questions_per_step % c.rl.updates_per_step:
        raise ValueError(
            f"config.rl.questions_per_step = {c.rl.questions_per_step} is not a "
            f"multiple of config.rl.updates_per_step = {c.rl.updates_per_step}: the "
            "rollouts of a question belong to one update"
        )
    if c.data.max_train and c.data.max_train < c.rl.questions_per_step:
        raise ValueError(
            f"config.data.max_train = {c.data.max_train} is below "
            f"config.rl.questions_per_step = {c.rl.questions_per_step}"
        )
    total = c.rl.steps * c.rl.updates_per_step
    if c.rl.decay and c.rl.warmup_steps >= total:
        raise ValueError(
            f"config.rl.warmup_steps = {c.rl.warmup_steps} leaves no room for a decay "
            f"in {c.rl.steps} steps x {c.rl.updates_per_step} updates = {total} "
            "optimiser steps"
        )


def _check_sft_batch(c):
    if "sft" not in c.stages:
        return
    if c.sft.batch_size % c.sft.micro_batch:
        raise ValueError(
            f"config.sft.batch_size = {c.sft.batch_size} is not a multiple of "
            f"config.sft.micro_batch = {c.sft.micro_batch}"
        )
    if c.sft.decay and c.sft.warmup_steps >= c.sft.steps:
        raise ValueError(
            f"config.sft.warmup_steps = {c.sft.warmup_steps} leaves no room for the "
            f"decay in config.sft.steps = {c.sft.steps}"
        )


def _check_shards(c, data=None):
    """Micro-batches must split evenly over the devices that share the batch."""
    data = max(c.mesh.data, 1) if data is None else data
    shards = data * c.mesh.fsdp
    for stage in c.stages:
        rows = c[stage].micro_batch
        if rows % shards:
            raise ValueError(
                f"config.{stage}.micro_batch = {rows} is not a multiple of mesh.data x "
                f"mesh.fsdp = {data} x {c.mesh.fsdp} = {shards}"
            )


def _check_mesh(c, num_devices):
    known = c.mesh.fsdp * c.mesh.tensor
    data = num_devices // known if c.mesh.data == -1 else c.mesh.data
    if data * known != num_devices:
        raise ValueError(
            f"mesh does not fit: data {c.mesh.data} x fsdp {c.mesh.fsdp} x tensor "
            f"{c.mesh.tensor}, but there are {num_devices} devices"
        )
    _check_shards(c, data)


CROSS_CHECKS = (
    _check_sources,
    _check_world,
    _check_nucleus,
    _check_shape,
    _check_context,
    _check_groups,
    _check_rl_batch,
    _check_sft_batch,
    _check_shards,
)
