"""R1-Searcher++: search only for unknown facts, and memorise what was found.

    python -m rsearch.train --config=configs/r1_searcher_pp.py --dry_run
    python -m rsearch.train --config=configs/r1_searcher_pp.py:tiny --workdir=runs/r1spp

Words after the colon: `no_group` leaves out the group reward and `no_memory` the
memorisation (the paper's ablations); `stage1` is only the cold start and `stage2` only
the reinforcement; `parity` follows R1-Searcher's public code, on which this method's
code is said to be built; `tiny` runs on the embedded world. Source: arXiv 2505.17005.

    python -m rsearch.index --corpus=kilt_100w.jsonl --family=bge \\
        --encoder=BAAI/bge-large-en-v1.5 --out=indexes/kilt_100w_bge_large \\
        --max_passage_tokens=300 --max_query_tokens=256
"""

from ml_collections import ConfigDict

from configs import base, full_scale, tiny_world, variants

STAGES = {
    "all": ("curate_sft", "sft", "curate_rewriter", "sft_rewriter", "rl"),
    "stage1": ("curate_sft", "sft"),
    "stage2": ("curate_rewriter", "sft_rewriter", "rl"),
}
FLAGS = ("no_group", "no_memory", "parity", "tiny")
BACKBONE = "Qwen/Qwen2.5-7B-Instruct"


def get_config(variant=""):
    """Return the recipe's configuration; the module's docstring lists the variants."""
    choices = {"stage": tuple(STAGES)}
    words = variants.parse_variant(variant, choices=choices, flags=FLAGS)
    c = base.get_config()
    name = "r1_searcher_pp"
    c.name = "_".join([name, *variant.split(",")]) if variant else name
    stages = STAGES[words.stage]
    if words.no_memory:
        stages = tuple(stage for stage in stages if "rewriter" not in stage)
    c.stages = stages
    method(c, words)
    (tiny if words.tiny else at_full_scale)(c, words)
    if words.parity:
        parity(c, words)
    overrides = c.overrides.to_dict()
    c.overrides = ConfigDict(
        {s: overrides[s] for s in c.stages if s in overrides}
    ).lock()
    return c


def method(c, words):
    """Set what is the same at any size: the paper's algorithm and rewards (Eq. 3-9)."""
    c.protocol.name = "r1_searcher_pp"
    # Equation 4 defines a right answer, both for the reward and for data selection.
    correct_answer = {"normalize": "r1_searcher", "order": "substring", "max_words": 10}
    reward = {
        "answer_cover_em": correct_answer,
        "r1_searcher_pp_format": {"good": 0.0, "bad": -2.0},
        "group_fewest_searches": {"eta": 2.0, "over": "all", "weight": 1.0}
        | correct_answer,
    }
    if words.no_group:
        del reward["group_fewest_searches"]
    rewriter_settings = {
        "sft": {"demonstrations": "stage:curate_rewriter"},
        "trains": "rewriter",
    }
    rejection = {"method": "both_knowledge", "measure": "cover_em"} | correct_answer
    rejection |= {"rollouts": 16, "max_kept": 805}
    # The rewriter learns from the same rollouts as the cold start (section 4.2.2).
    shared_rollouts = {"first": "stage:curate_sft"} if "curate_sft" in c.stages else {}
    c.reward = ConfigDict(reward).lock()
    c.overrides = ConfigDict(
        {
            "curate_sft": {"curate": rejection},
            "curate_rewriter": {
                "curate": rejection | {"method": "rewriter"} | shared_rollouts
            },
            "sft_rewriter": rewriter_settings,
        }
    ).lock()
    c.sft.demonstrations = "stage:curate_sft"
    c.rl.update(algorithm="reinforce_pp", loss_mean="sequence", updates_per_step=1)
    c.rl.update(kl_kind="k1", kl_place="reward", kl_coef=1e-4)
    c.rollout.update(group_size=16, max_searches=8)
    if not words.no_memory:
        c.rl.memorise_coef = 0.1
        if "sft_rewriter" in c.stages:
            c.models.rewriter.source = "stage:sft_rewriter"
    c.eval.normalize = "r1_searcher"


def at_full_scale(c, words):
    """Set the sizes of the paper's appendix A."""
    full_scale.backbone(c, BACKBONE)
    full_scale.kilt_with_bge(c, top_k=3)
    full_scale.openrlhf_adamw(c)
    full_scale.eight_devices(c, tensor=4)
    full_scale.sparse_checkpoints(c, rl_steps=10)
    # R1-Searcher's questions: 4,561 of HotpotQA and 3,581 of 2WikiMultiHopQA.
    c.data.train = "data/r1_searcher_stage2.jsonl"
    c.data.dev = full_scale.questions("hotpotqa", "dev")
    c.rollout.update(
        max_prompt_tokens=1024,
        max_turn_tokens=512,
        max_observation_tokens=1024,
        top_p=0.95,
        max_concurrent=256,
    )
    # One epoch; an update has 1024 rows, 16 rollouts of each of 64 questions.
    c.rl.update(questions_per_step=64, steps=8142 // 64, lr=2e-6)
    c.rl.old_logprobs = "recompute"
    # Six epochs of 805 demonstrations: 720 of HotpotQA and 85 of 2WikiMultiHopQA.
    c.sft.update(batch_size=64, steps=6 * 805 // 64, lr=2e-5)
    c.sft.update(sequence_tokens=8192, warmup_steps=0, loss_mean="sequence")  # Eq. 2
    c.models.rewriter.update(
        max_prompt_tokens=6144, max_reply_tokens=2048, max_concurrent=32
    )


def parity(c, words):
    """Follow R1-Searcher's public code; this method's own code was never published."""
    c.rl.old_logprobs = "recompute"
    c.rollout.top_p = 0.95
    c.rl.algorithm = "reinforce_pp_baseline"
    reward = c.reward.to_dict()
    for name in ("answer_cover_em", "group_fewest_searches"):
        if name in reward:
            reward[name] |= {"order": "any"}
    stages = c.overrides.to_dict()
    for name in ("curate_sft", "curate_rewriter"):
        stages[name]["curate"] |= {"order": "any"}
    c.reward, c.overrides = ConfigDict(reward).lock(), ConfigDict(stages).lock()


def tiny(c, words):
    """Set the sizes for the embedded world."""
    tiny_world.set_tiny_world(c)
    c.rollout.update(group_size=8)
    # Memorisation also changes how so small a model searches, and its world's
    # comparisons can be guessed without a search. With the paper's mu (0.1) and weight
    # (1) it stops searching, so both are lowered here.
    c.rl.update(memorise_rows=c.rl.micro_batch, steps=28)
    if not words.no_memory:
        c.rl.memorise_coef = 0.002
    if not words.no_group:
        c.reward.group_fewest_searches.weight = 0.3
    c.models.rewriter.update(
        max_concurrent=32, max_prompt_tokens=96, max_reply_tokens=40
    )
    # A hundred demonstrations of recall: enough to show the format, not to learn more.
    c.sft.update(steps=8, lr=2e-4)
    stages = c.overrides.to_dict()
    for name in ("curate_sft", "curate_rewriter"):
        stages[name]["curate"] |= {"rollouts": 4, "max_kept": 400}
    stages["sft_rewriter"]["sft"] |= {"steps": 30, "lr": 1e-3}
    c.overrides = ConfigDict(stages).lock()
