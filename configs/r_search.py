"""R-Search: reason and search, summarise the evidence, answer; all three are rewarded.

    python -m rsearch.train --config=configs/r_search.py --dry_run
    python -m rsearch.train --config=configs/r_search.py:tiny --workdir=runs/r_search

Words after the colon: `grpo` (the default) or `ppo`; `7b` (the default) or `3b`;
`no_evidence` leaves the evidence out of the prompt and the rewards (the paper's Table
3); `parity` follows the public code; `tiny` runs on the embedded world.
Source: arXiv 2506.04185.

The questions are the 167,454 training questions of 2WikiMultiHopQA, from its authors'
train.json (FlashRAG has 15,000 of them). The corpus is its paragraphs:

    python -m rsearch.index --corpus=2wikimultihopqa.jsonl --family=e5 \\
        --encoder=intfloat/e5-base-v2 --out=indexes/2wikimultihopqa_e5_base \\
        --max_passage_tokens=512 --max_query_tokens=256
"""

from ml_collections import ConfigDict

from configs import base, full_scale, tiny_world, variants

CHOICES = {"algorithm": ("grpo", "ppo"), "size": ("7b", "3b")}
FLAGS = ("no_evidence", "parity", "tiny")
BACKBONES = {"7b": "Qwen/Qwen2.5-7B-Instruct", "3b": "Qwen/Qwen2.5-3B-Instruct"}
JUDGE = "meta-llama/Llama-3.2-3B-Instruct"  # not of the policy's model family
NO_EVIDENCE_SYSTEM = (
    "You are a helpful assistant that can solve the given question step by step. For "
    "each step, start by explaining your thought process. If additional information is "
    "needed, provide a specific query enclosed in <search> and </search>. The system "
    "will return the top search results within <observation> and </observation>. You "
    "can perform multiple searches as needed. Finally, provide the final answer within "
    "<answer> and </answer> tags."
)


def get_config(variant=""):
    """Return the recipe's configuration; the module's docstring lists the variants."""
    words = variants.parse_variant(variant, choices=CHOICES, flags=FLAGS)
    c = base.get_config()
    c.name = "_".join(["r_search", *variant.split(",")]) if variant else "r_search"
    c.stages = ("rl",)
    method(c, words)
    (tiny if words.tiny else at_full_scale)(c, words)
    if words.parity:
        parity(c, words)
    return c


def method(c, words):
    """Set what is the same at any size: the paper's algorithm and rewards (Eq. 3-6)."""
    c.protocol.name = "r_search"
    evidence = 0.0 if words.no_evidence else 0.2
    reward = {
        "answer_f1": {},
        "evidence_f1": {},
        "r_search_format": {"evidence": evidence, "answer": 0.2},
    }
    if words.no_evidence:
        del reward["evidence_f1"]
        c.protocol.system = NO_EVIDENCE_SYSTEM
    c.reward = ConfigDict(reward).lock()
    c.rl.update(algorithm=words.algorithm, kl_coef=0.001, clip_low=0.2, clip_high=0.2)
    is_grpo = words.algorithm == "grpo"
    kl = ("k3", "loss") if is_grpo else ("k1", "reward")
    c.rl.update(kl_kind=kl[0], kl_place=kl[1], gamma=1.0, gae_lambda=1.0)
    c.rollout.update(group_size=5 if is_grpo else 1, max_searches=4)


def at_full_scale(c, words):
    """Set the sizes of the paper's section 4.3."""
    is_grpo = words.algorithm == "grpo"
    full_scale.backbone(c, BACKBONES[words.size])
    index = "indexes/2wikimultihopqa_e5_base"
    full_scale.wiki18_with_e5(c, top_k=3, index=index, max_passage_tokens=512)
    full_scale.verl_adamw(c)
    full_scale.eight_devices(c, tensor=2 if words.size == "3b" else 4)
    full_scale.sparse_checkpoints(c, rl_steps=15)
    c.data.train = "data/2wikimultihopqa/train.json"
    c.data.dev = full_scale.questions("2wikimultihopqa", "dev")
    c.rollout.update(
        max_prompt_tokens=1024,
        max_turn_tokens=500,
        max_observation_tokens=1800,
        max_concurrent=320 if is_grpo else 256,
    )
    # 256 questions per step; the warm-up is 0.95 of 195 steps.
    c.rl.update(steps=195, questions_per_step=256, updates_per_step=1)
    c.rl.update(lr=1e-6, warmup_steps=185)
    c.critic.update(lr=1e-5, warmup_steps=9)  # 0.05 of the steps
    if not words.no_evidence:
        c.models.judge.update(
            source=JUDGE,
            max_concurrent=64,
            max_prompt_tokens=1024,
            max_reply_tokens=512,
            temperature=0.1,
            top_p=0.9,
        )


def parity(c, words):
    """Follow the public code where the paper differs or says nothing."""
    c.rollout.top_p = 0.95
    c.rl.update(old_logprobs="recompute", entropy_coef=0.001, loss_mean="micro_token")
    c.rl.update(advantage_mask="response", lr_first_step_zero=True)
    if c.rl.kl_kind == "k3":
        c.rl.kl_cap = 10.0
    reward = c.reward.to_dict()
    transcript_scope = {"scope": "transcript"}
    f1 = {"decimals": 2, "empty_matches": True}
    reward["answer_f1"] |= transcript_scope | f1
    tags = transcript_scope | {"indicator": "tags"}
    reward["r_search_format"] |= tags | {
        "unsearched_evidence_pays": False,
        "empty_gets_format": True,
        "forged_pays": True,
    }
    if "evidence_f1" in reward:
        reward["evidence_f1"] |= tags | f1
    c.reward = ConfigDict(reward).lock()
    if not words.tiny:
        steps = 195 if words.size == "3b" else 120
        # The code takes both warm-ups as shares of these steps.
        c.rl.update(steps=steps, warmup_steps=int(0.95 * steps))
        c.critic.warmup_steps = int(0.05 * steps)
        c.rl.micro_batch = 8  # a device's share of 64, over which it takes the mean
        if words.algorithm == "grpo":
            c.rl.updates_per_step = 4


def tiny(c, words):
    """Set the sizes for the embedded world."""
    tiny_world.set_tiny_world(c)
    c.rollout.update(group_size=8)
    if words.algorithm == "ppo":
        tiny_world.ppo(c)
    if not words.no_evidence:
        c.models.judge.update(source="world:judge", max_concurrent=128)
        c.models.judge.update(max_prompt_tokens=128, max_reply_tokens=16)
