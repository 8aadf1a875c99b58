"""Search-R1: reason and search between tags; only an exact answer is rewarded.

    python -m rsearch.train --config=configs/search_r1.py --dry_run
    python -m rsearch.train --config=configs/search_r1.py:tiny --workdir=runs/search_r1

Words after the colon: `ppo` (the default) or `grpo`; `7b` (the default) or `3b`; `base`
(the default) or `instruct`; `format` is the reward of v0.3, which also rewards
structure and, at full scale, retrieval; `parity` follows the public code; `tiny` runs
on the embedded world.
Sources: arXiv 2503.09516 and, for `format`, 2505.15117.

    python -m rsearch.index --corpus=wiki-18.jsonl --family=e5 \\
        --encoder=intfloat/e5-base-v2 --out=indexes/wiki18_100w_e5_base \\
        --max_passage_tokens=256 --max_query_tokens=256
"""

from ml_collections import ConfigDict

from configs import base, full_scale, tiny_world, variants

CHOICES = {
    "algorithm": ("ppo", "grpo"),
    "size": ("7b", "3b"),
    "model": ("base", "instruct"),
}
FLAGS = ("format", "parity", "tiny")
BACKBONES = {
    ("7b", "base"): "Qwen/Qwen2.5-7B",
    ("7b", "instruct"): "Qwen/Qwen2.5-7B-Instruct",
    ("3b", "base"): "Qwen/Qwen2.5-3B",
    ("3b", "instruct"): "Qwen/Qwen2.5-3B-Instruct",
}


def get_config(variant=""):
    """Return the recipe's configuration; the module's docstring lists the variants."""
    words = variants.parse_variant(variant, choices=CHOICES, flags=FLAGS)
    c = base.get_config()
    c.name = "_".join(["search_r1", *variant.split(",")]) if variant else "search_r1"
    c.stages = ("rl",)
    method(c, words)
    (tiny if words.tiny else at_full_scale)(c, words)
    if words.parity:
        parity(c, words)
    return c


def method(c, words):
    """Set what is the same at any size: the paper's algorithm and reward."""
    c.protocol.name = "search_r1"
    form = {"search_r1_structure": {"structure": 0.2, "final": 0.1, "retrieval": 0.0}}
    c.reward = ConfigDict(form if words.format else {"answer_em": {}}).lock()
    c.rl.update(algorithm=words.algorithm, kl_coef=0.001, clip_low=0.2, clip_high=0.2)
    is_ppo = words.algorithm == "ppo"
    kl = ("k1", "reward") if is_ppo else ("k3", "loss")
    c.rl.update(kl_kind=kl[0], kl_place=kl[1], gamma=1.0, gae_lambda=1.0)
    c.rollout.update(group_size=1 if is_ppo else 5, max_searches=4)


def at_full_scale(c, words):
    """Set the sizes of the paper's appendix."""
    is_ppo = words.algorithm == "ppo"
    full_scale.backbone(c, BACKBONES[words.size, words.model])
    full_scale.wiki18_with_e5(c, top_k=3)
    full_scale.verl_adamw(c)
    full_scale.eight_devices(c, tensor=2 if words.size == "3b" else 4)
    full_scale.sparse_checkpoints(c, rl_steps=50)
    if words.format:
        # The paper's number; on the embedded world retrieval is not rewarded.
        c.reward.search_r1_structure.retrieval = 0.1
    # Questions of NQ and HotpotQA in one file, as the paper mixes them.
    c.data.train = "data/nq_hotpotqa_train.jsonl"
    c.data.dev = full_scale.questions("nq", "test")
    c.rollout.update(
        max_prompt_tokens=1024,
        max_turn_tokens=500,
        max_observation_tokens=500,
        max_concurrent=512 if is_ppo else 640,
    )
    # Batches of 512 questions, in updates of 256.
    c.rl.update(steps=500, questions_per_step=512, updates_per_step=2)
    # Warm-up of 0.285 and 0.015 of 500 steps, in optimiser steps.
    c.rl.update(lr=1e-6, warmup_steps=142 * 2)
    if words.format and not is_ppo:
        c.rl.lr = 5e-7  # v0.3 halves the rate of GRPO only
    c.critic.update(lr=1e-5, warmup_steps=7 * 2)


def parity(c, words):
    """Follow the public code where the paper differs or says nothing."""
    is_ppo = words.algorithm == "ppo"
    c.rl.update(old_logprobs="recompute", entropy_coef=0.001, loss_mean="micro_token")
    c.rl.update(advantage_mask="response", lr_first_step_zero=True)
    if c.rl.kl_kind == "k3":
        c.rl.kl_cap = 10.0
    c.rollout.cut_tags = True
    if not is_ppo:
        c.rollout.top_p = 0.95  # only v0.2's and v0.3's scripts with PPO set 1
    (name, settings), *_ = c.reward.to_dict().items()
    settings |= {"scope": "transcript", "empty_matches": True}
    if words.format:
        settings["retrieval"] = 0.0  # in all scripts
    c.reward = ConfigDict({name: settings}).lock()
    if not words.tiny:
        c.rl.update(steps=1005, warmup_steps=286)
        c.rl.micro_batch = 8  # a device's share of 64, over which it takes the mean
        c.critic.warmup_steps = 15
        if not is_ppo:
            # Ten in the code: 512 x 5 rows in updates of 256. Here the rollouts of a
            # question stay together, so the number must divide the questions.
            c.rl.updates_per_step = 8


def tiny(c, words):
    """Set the sizes for the embedded world."""
    tiny_world.set_tiny_world(c)
    c.rollout.group_size = 8
    if words.algorithm == "ppo":
        tiny_world.ppo(c)
