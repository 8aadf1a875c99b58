"""What a configuration may hold: a range for each field.

`validate` runs before anything compiles. A field without a rule is free text. What must
fit together is in `rsearch/config/crosschecks.py`.
"""

import math
import re

from rsearch.config.crosschecks import CROSS_CHECKS, check_mesh
from rsearch.config.stage_plan import AGENTS, STAGE, is_stage, stage_configs
from rsearch.text.extension import SPELLING, is_reference

EVIDENCE, READER_RAG = "evidence", "reader_rag"
READER_METHODS = (EVIDENCE, "reader_direct", READER_RAG)
COLDEST = 1e-6  # temperature that is sampled at: logits divided by less overflow
MIX = r"(\S+ )?(easy|medium|hard) (\d+(:\d*)?|0?\.\d+)"  # of curate.mix
METHODS = ("protocol", "direct", "rag", *READER_METHODS)
CURATE_METHODS = ("segments", "answerable", "difficulty", "mix", "both_knowledge")
CURATE_METHODS += ("rewriter", "chains", "no_reasoning")
OFFLOADED = ("reference", "optimizer")
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")  # of a layer
WORLD_KINDS = ("single", "bridge", "three_hop", "four_hop", "comparison")
WORLD_KINDS += ("unanswerable",)
WORDS = {  # fields of one word -> the words there are
    "model.dtype": ("float32", "bfloat16"),
    "data.on_bad": ("raise", "skip"),
    "rollout.on_invalid": ("message", "end"),
    "trains": ("policy", "rewriter"),
    "rl.kl_kind": ("k1", "k2", "k3"),
    "rl.kl_place": ("loss", "reward"),
    "rl.loss_mean": ("token", "sequence", "constant", "micro_token"),
    "rl.algorithm": ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo"),
    "rl.advantage_mask": ("policy", "response"),
    "rl.ratio": ("token", "sequence"),
    "rl.kl_controller": ("fixed", "adaptive"),
    "rl.behavior": ("sampled", "scored"),
    "curate.measure": ("em", "cover_em", "f1"),
    "curate.order": ("any", "contiguous", "substring"),
    "curate.normalize": ("squad", "r1_searcher"),
    "curate.observations": ("engine", "gold"),
    "eval.normalize": ("squad", "r1_searcher"),
    "eval.answer_from": ("finish", "log"),
    "optim.moments_dtype": ("float32", "bfloat16"),
    "retrieval.writing": ("context_only", "unless_comparison"),
    "guards.on_collapse": ("warn", "stop", "roll_back"),
    "retrieval.api": ("search_r1", "r1_searcher", "rearag", "serper"),
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


def _or_none(rule):
    is_right, right = rule
    return lambda x: x is None or is_right(x), f"None, or {right}"


def _one_of(words):
    return lambda x: x in words, "one of " + ", ".join(map(repr, words))


def _some_of(words):
    def is_right(x):
        return 0 < len(x) == len(set(x)) and set(x) <= set(words)

    return is_right, "each once, some of " + ", ".join(map(repr, words))


ASKED_MODEL = {  # fields of a model that is asked beside the policy
    "slots": _at_least(1),
    "max_prompt_tokens": _at_least(1),
    "max_reply_tokens": _at_least(1),
    "temperature": (lambda x: x == 0 or x >= COLDEST, f"0, or a number >= {COLDEST}"),
    "top_p": (lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "timeout_seconds": _above(0),
    "max_retries": _at_least(0),
}
RULES = {  # field -> (predicate, what would be right)
    "seed": _between(0, 2**31 - 1),
    "stages": (
        lambda x: 0 < len(x) == len(set(x)) and all(map(is_stage, x)),
        "names, each once: 'rl' or 'rl_<word>', likewise 'sft' and 'curate'",
    ),
    "model.num_layers": _at_least(1),
    "model.width": _at_least(1),
    "model.num_heads": _at_least(1),
    "model.num_kv_heads": _at_least(1),
    "model.head_dim": (lambda x: x >= 2 and x % 2 == 0, "an even number >= 2"),
    "model.mlp_width": _at_least(1),
    "model.vocab_size": _at_least(0),
    "model.offload": (
        lambda x: len(x) == len(set(x)) and set(x) <= set(OFFLOADED),
        "each once, any of " + ", ".join(map(repr, OFFLOADED)),
    ),
    "model.lora_rank": _at_least(0),
    "model.lora_alpha": _above(0),
    "model.lora_matrices": _some_of(MATRICES),
    "model.rope_theta": _above(0),
    "protocol.max_queries": _at_least(0),
    "protocol.instruction": (
        lambda x: x is None or "{question}" in x,
        "a text that holds {question}",
    ),
    "protocol.direct": (
        lambda x: x is None or "{question}" in x,
        "a text that holds {question}",
    ),
    "protocol.rewrite": (
        lambda x: x is None or ("{question}" in x and "{document}" in x),
        "a text that holds {document} and {question}",
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
    "world.kinds": _some_of(WORLD_KINDS),
    "world.known_share": _between(0, 1),
    "world.missing_share": _between(0, 1),
    "world.distractors": _at_least(0),
    "retrieval.timeout_seconds": _above(0),
    "retrieval.max_retries": _at_least(0),
    "retrieval.page_chars": _at_least(1),
    "retrieval.outage_seconds": _at_least(0),
    "retrieval.search_seconds": _above(0),
    "retrieval.max_query_tokens": _at_least(0),
    "retrieval.max_passage_tokens": _at_least(0),
    "retrieval.top_k": _at_least(1),
    "retrieval.rerank_from": _at_least(1),
    "retrieval.cache_size": _at_least(0),
    "retrieval.hashed_dim": _at_least(1),
    "rollout.group_size": _at_least(1),
    "rollout.max_searches": _between(0, 98),
    "rollout.max_turn_tokens": _at_least(1),
    "rollout.max_observation_tokens": _at_least(1),
    "rollout.max_prompt_tokens": _at_least(1),
    "rollout.context_tokens": _at_least(0),
    "rollout.temperature": _at_least(COLDEST),
    "rollout.top_p": (lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "rollout.slots": _at_least(1),
    "rollout.cache_tokens": _at_least(0),
    "rollout.page_tokens": (
        lambda x: x >= 16 and x % 16 == 0,
        "a multiple of 16: whole tiles of an accelerator's memory",
    ),
    "rollout.extend_chunk": _at_least(1),
    "curate.method": (
        lambda x: x in CURATE_METHODS or is_reference(x),
        f"one of {', '.join(map(repr, CURATE_METHODS))}, or {SPELLING}",
    ),
    "retrieval.engine": (lambda x: x == "" or is_reference(x), f"'' or {SPELLING}"),
    "curate.max_words": _at_least(0),
    "curate.rollouts": _at_least(1),
    "curate.per_question": _at_least(1),
    "curate.max_kept": _at_least(0),
    "curate.first": (
        lambda x: x == "" or x.startswith(STAGE),
        "'' or 'stage:<name>'",
    ),
    "curate.retry_temperature": _at_least(COLDEST),
    "curate.retry_rollouts": _at_least(0),
    "curate.retry_searches": _at_least(0),
    "curate.right_share": _between(0, 1),
    "curate.easy_below": _at_least(1),
    "curate.hard_above": _at_least(1),
    "curate.mix": (
        lambda x: all(re.fullmatch(MIX, entry) for entry in x),
        "texts such as 'medium 200', 'hotpotqa hard 2000', 'easy 0.5', 'hard 10:20'",
    ),
    "curate.max_steps": _at_least(1),
    "curate.max_retries": _at_least(0),
    "sft.steps": _at_least(0),
    "sft.batch_size": _at_least(1),
    "sft.micro_batch": _at_least(1),
    "sft.sequence_tokens": _at_least(2),
    "sft.lr": _at_least(0),
    "sft.warmup_steps": _at_least(0),
    "sft.repeats": _at_least(1),
    "sft.baseline_share": _between(0, 1),
    "sft.recall_share": _between(0, 1),
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
    "rl.kl_target": _above(0),
    "rl.kl_gain": _between(0, 1),
    "rl.gamma": _between(0, 1),
    "rl.gae_lambda": _between(0, 1),
    "rl.tis_cap": _at_least(0),
    "rl.dual_clip": (lambda x: x == 0 or x > 1, "0, or a finite number > 1"),
    "rl.loss_tokens": _at_least(0),
    "rl.refill_rounds": _at_least(0),
    "rl.memorise_coef": _at_least(0),
    "rl.memorise_rows": _at_least(1),
    "rl.std_ddof": _between(0, 1),
    "critic.lr": _at_least(0),
    "critic.warmup_steps": _at_least(0),
    "critic.max_grad_norm": _above(0),
    "critic.value_clip": _at_least(0),
    "critic.pretrain_steps": _at_least(0),
    "rl.std_eps": _above(0),
    "rl.entropy_coef": _at_least(0),
    "optim.b1": (lambda x: 0 <= x < 1, "a number from 0, below 1"),
    "optim.b2": (lambda x: 0 <= x < 1, "a number from 0, below 1"),
    "optim.eps": _above(0),
    "optim.weight_decay": _at_least(0),
    "optim.max_grad_norm": _above(0),
    "reward": (lambda x: len(x) > 0, "at least one term with its settings"),
    **{
        f"{model}.{field}": rule
        for model in AGENTS
        for field, rule in ASKED_MODEL.items()
    },
    "mesh.data": (
        lambda x: x == -1 or x >= 1,
        "a number >= 1, or -1 for all remaining",
    ),
    "mesh.fsdp": _at_least(1),
    "mesh.tensor": _at_least(1),
    "checkpoint.sft_steps": _at_least(1),
    "checkpoint.rl_steps": _at_least(1),
    "checkpoint.keep": _at_least(1),
    "checkpoint.grace_seconds": _at_least(0.0),
    "checkpoint.retry_seconds": _at_least(0.0),
    "guards.max_skipped": _at_least(1),
    "guards.dumps": _at_least(0),
    "guards.patience": _at_least(1),
    "guards.max_roll_backs": _at_least(0),
    "guards.min_entropy": _or_none(_at_least(0.0)),
    "guards.max_empty": _or_none(_between(0, 1)),
    "guards.max_repeated": _or_none(_between(0, 1)),
    "guards.max_kl": _or_none(_at_least(0.0)),
    "guards.max_clipped": _or_none(_between(0, 1)),
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
    _validate_stage(config, num_devices)
    for stage, own in stage_configs(config):
        if config.overrides.get(stage):
            try:
                _validate_stage(own, num_devices)
            except ValueError as error:
                raise ValueError(f"config.overrides.{stage}: {error}") from None


def _validate_stage(config, num_devices):
    """The configuration of one stage, its overrides applied."""
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
        check_mesh(config, num_devices)


def _leaves(config, prefix=""):
    for key, value in config.items():
        if hasattr(value, "items"):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
