"""R1-Searcher: learn to call search, then to answer, by Reinforce++ without SFT.

    python -m rsearch.train --config=configs/r1_searcher.py --dry_run
    python -m rsearch.train --config=configs/r1_searcher.py:tiny --workdir=runs/r1s

Words after the colon: `qwen`, the base model with raw-text prompts (the default), or
`llama`, the chat model; `reinforce_pp` (the default) or `grpo`; `stage1` or `stage2` to
run only one stage; `f1` (the default), `cem` or `em` as the answer's reward (the
paper's Table 5); `select` begins with the data selection of section 2.1, from one file
of both training sets whose records name theirs as "data_source" (hotpotqa or
2wikimultihopqa), instead of reading the published questions from data/; `parity`
follows the public code; `tiny` runs on the embedded world. Source: arXiv 2503.05592.

    python -m rsearch.index --corpus=kilt_100w.jsonl --family=bge \\
        --encoder=BAAI/bge-large-en-v1.5 --out=indexes/kilt_100w_bge_large \\
        --max_passage_tokens=300 --max_query_tokens=256
"""

from ml_collections import ConfigDict

from configs import base, full_scale, tiny_world, variants

CHOICES = {
    "model": ("qwen", "llama"),
    "algorithm": ("reinforce_pp", "grpo"),
    "stage": ("all", "stage1", "stage2"),
    "answer": ("f1", "cem", "em"),
}
BACKBONES = {"qwen": "Qwen/Qwen2.5-7B", "llama": "meta-llama/Llama-3.1-8B-Instruct"}
STAGES = {
    "all": ("rl_retrieve", "rl_answer"),
    "stage1": ("rl_retrieve",),
    "stage2": ("rl_answer",),
}
SELECTS = {"rl_retrieve": "curate_retrieve", "rl_answer": "curate_answer"}
# Table 1's numbers of questions; the second stage takes those after the first stage's.
MIX_RETRIEVE = ("hotpotqa medium 200", "2wikimultihopqa medium 150")
MIX_ANSWER = (
    "hotpotqa medium 200:2761",
    "hotpotqa hard 2000",
    "2wikimultihopqa medium 150:1237",
    "2wikimultihopqa hard 2500",
)
SELECTING_SYSTEM = (
    "You are a helpful assistant.\nGiven a question, you should answer it by first "
    "thinking about the reasoning process in the mind and then providing the final "
    "answer. The output format of reasoning process and final answer are enclosed "
    "within <think> </think> and <answer> </answer> tags, respectively, i.e., "
    '"<think> reasoning process here </think>\n\n<answer> final answer here </answer>".'
    " You should perform thinking with decomposing, reflecting, brainstorming, "
    "verifying, refining, and revising. Besides, you can perform searching for "
    'uncertain knowledge if necessary with the format of "<|begin_of_query|> search '
    'query (only keywords) here <|end_of_query|>". Then, the search system will '
    "provide you with the retrieval information with the format of "
    '"<|begin_of_documents|> ...search results... <|end_of_documents|>".'
)
"""Section 2.1's "System Prompt for Data Selection", with line breaks as in training."""
REWARDS = {
    "rl_retrieve": {
        "searched": {"value": 0.5},
        "r1_searcher_format": {"good": 0.5, "bad": 0.0},
    },
    "f1": {"answer_f1": {"normalize": "r1_searcher"}},
    # Eq. 5: 1 or -1.
    "cem": {"answer_cover_em": {"normalize": "r1_searcher", "wrong": -1.0}},
    "em": {"answer_em": {"normalize": "r1_searcher", "wrong": -1.0}},
}


def get_config(variant=""):
    """Return the recipe's configuration; the module's docstring lists the variants."""
    flags = ("select", "parity", "tiny")
    words = variants.parse_variant(variant, choices=CHOICES, flags=flags)
    c = base.get_config()
    c.name = (
        "_".join(["r1_searcher", *variant.split(",")]) if variant else "r1_searcher"
    )
    stages = STAGES[words.stage]
    if words.parity and words.model == "qwen" and words.stage == "all":
        stages = STAGES["stage2"]  # the released Qwen run has no first stage
    c.stages = tuple(SELECTS[s] for s in stages if words.select) + stages
    method(c, words)
    (tiny if words.tiny else at_full_scale)(c, words)
    if words.parity:
        parity(c, words)
    return c


def method(c, words):
    """Set what is the same at any size: the paper's algorithm and rewards (Eq. 1-4)."""
    is_chat = words.model == "llama"
    c.protocol.name = "r1_searcher_chat" if is_chat else "r1_searcher"
    answer = REWARDS[words.answer] | {"r1_searcher_format": {"good": 0.0, "bad": -2.0}}
    c.reward = ConfigDict(answer).lock()
    c.overrides = ConfigDict({"rl_retrieve": {"reward": REWARDS["rl_retrieve"]}}).lock()
    c.rl.update(algorithm=words.algorithm, loss_mean="sequence", updates_per_step=4)
    # 0 for Qwen, 1e-4 for Llama (section 3.3).
    c.rl.update(kl_kind="k1", kl_place="reward", kl_coef=1e-4 if is_chat else 0.0)
    c.rollout.update(group_size=16, max_searches=8)
    c.eval.normalize = "r1_searcher"


def at_full_scale(c, words):
    """Set the sizes of the paper's section 3.3."""
    full_scale.backbone(c, BACKBONES[words.model])
    full_scale.kilt_with_bge(c, top_k=3)
    full_scale.openrlhf_adamw(c)
    full_scale.eight_devices(c, tensor=4)
    full_scale.sparse_checkpoints(c, rl_steps=10)
    c.data.train = "data/r1_searcher_stage2.jsonl"
    c.data.dev = full_scale.questions("hotpotqa", "dev")
    c.rollout.update(
        max_prompt_tokens=768,
        max_turn_tokens=512,
        max_observation_tokens=1024,
        # The KV cache of Llama 3.1 8B is twice as large.
        max_concurrent=128 if words.model == "llama" else 256,
    )
    # One epoch; a step has 1024 rows, 16 rollouts of each of 64 questions, in updates
    # of 256.
    c.rl.update(questions_per_step=64, steps=8148 // 64, lr=2e-6)
    stages = c.overrides.to_dict()
    stages["rl_retrieve"] |= {
        "data": {"train": "data/r1_searcher_stage1.jsonl"},
        "rl": {"steps": 5},  # 350 questions
    }
    teacher = {"model": {"source": "Qwen/Qwen2.5-7B-Instruct"}}
    chat_protocol = {"name": "r1_searcher_chat", "system": SELECTING_SYSTEM}
    teacher |= {"protocol": chat_protocol}
    # The paper's cover exact match, without a limit on an answer's words, which only
    # R1-Searcher++ introduced.
    selection = {
        "method": "difficulty",
        "measure": "cover_em",
        "normalize": "r1_searcher",
    }
    selection |= {"rollouts": 21, "easy_below": 10, "hard_above": 20}
    training_data = {"data": {"train": "data/hotpotqa_2wikimultihopqa_train.jsonl"}}
    stages["curate_retrieve"] = teacher | training_data
    stages["curate_retrieve"] |= {"curate": selection | {"mix": MIX_RETRIEVE}}
    selection |= {"mix": MIX_ANSWER}
    if "curate_retrieve" in c.stages:  # its rollouts serve both stages
        selection |= {"method": "mix", "first": "stage:curate_retrieve"}
    stages["curate_answer"] = teacher | training_data | {"curate": selection}
    if words.select:
        stages["rl_retrieve"]["data"] = {"train": "stage:curate_retrieve"}
        stages["rl_answer"] = {"data": {"train": "stage:curate_answer"}}
    c.overrides = ConfigDict(_select_stages(stages, c.stages)).lock()


def parity(c, words):
    """Follow the public code where the paper differs or says nothing."""
    c.rollout.top_p = 0.95
    c.rl.old_logprobs = "recompute"
    if not words.tiny:
        c.retrieval.index = "indexes/hotpotqa_abstracts_bge_large"
    if words.algorithm == "reinforce_pp":
        c.rl.algorithm = "reinforce_pp_baseline"
    response_scope = {"scope": "response"}
    answer_scope = response_scope | {"empty_matches": True}
    reward = {
        name: settings
        | (answer_scope if name.startswith("answer_") else response_scope)
        for name, settings in c.reward.to_dict().items()
    }
    format_term = reward["r1_searcher_format"]
    stages = c.overrides.to_dict()
    if words.model == "qwen":
        format_term |= {"checks": "qwen", "assistant_check_scope": "response"}
    else:
        format_term |= {"checks": "llama_stage2", "bad": -1.0}
        # In the code the first stage uses GRPO and also rewards the answer.
        retrieve_overrides = stages.setdefault("rl_retrieve", {})
        retrieve_overrides["reward"] = {
            "answer_cover_em": REWARDS["cem"]["answer_cover_em"] | answer_scope,
            "searched": {"value": 0.5, "indicator": "tags"},
            "r1_searcher_format": {"good": 0.5, "bad": 0.0, "checks": "llama_stage1"}
            | response_scope,
        }
        rl_settings = retrieve_overrides.setdefault("rl", {})
        rl_settings |= {"algorithm": "grpo", "std_eps": 1e-9, "kl_credit": "token"}
        if not words.tiny:
            # 15 in the code, where several updates share a question's rollouts.
            rl_settings |= {"questions_per_step": 16}
    c.reward = ConfigDict(reward).lock()
    c.overrides = ConfigDict(_select_stages(stages, c.stages)).lock()


def _select_stages(stages, names):
    """Return the overrides of the stages in `names`."""
    return {name: stages[name] for name in names if name in stages}


def tiny(c, words):
    """Set the sizes for the embedded world."""
    tiny_world.set_tiny_world(c)
    c.rollout.update(group_size=8)
    c.rl.update(updates_per_step=1)
    stages = c.overrides.to_dict()
    stages["rl_retrieve"] |= {"rl": {"steps": 4}}
    for name in ("curate_retrieve", "curate_answer"):
        stages[name] = {"curate": {"method": "difficulty", "rollouts": 8}}
        stages[name]["curate"] |= {"easy_below": 3, "hard_above": 6}
    if words.select:
        for name, curate_stage in SELECTS.items():
            overrides = stages.get(name, {})
            stages[name] = overrides | {"data": {"train": f"stage:{curate_stage}"}}
    c.overrides = ConfigDict(_select_stages(stages, c.stages)).lock()
