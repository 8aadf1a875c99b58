"""Recipes have the numbers of their papers, and every variant's word is valid."""

import inspect
import itertools

import pytest

from configs import variants
from rsearch.config import recipes as configuration
from rsearch.config.stage_plan import stage_config, stage_configs
from rsearch.plan.dry_run import dry_run
from rsearch.plan.machines import GPU_SHARE
from rsearch.protocols.table import PROTOCOLS
from rsearch.rewards.group import check_terms
from rsearch.rewards.terms import TERMS
from rsearch.setup.policy import configured_limits, policy_protocol

CHOICES = {  # recipe -> its choices, one word of which is chosen each, and its flags
    "search_r1": (
        [("ppo", "grpo"), ("7b", "3b"), ("base", "instruct")],
        ["format", "parity", "tiny"],
    ),
    "rag_r1": (
        [("mq", "sq"), ("ppo", "grpo"), ("all", "stage1", "stage2")],
        ["parity", "tiny"],
    ),
    "r1_searcher": (
        [
            ("qwen", "llama"),
            ("reinforce_pp", "grpo"),
            ("all", "stage1", "stage2"),
            ("f1", "cem", "em"),
        ],
        ["select", "parity", "tiny"],
    ),
    "r1_searcher_pp": (
        [("all", "stage1", "stage2")],
        ["no_group", "no_memory", "parity", "tiny"],
    ),
    "r_search": ([("grpo", "ppo"), ("7b", "3b")], ["no_evidence", "parity", "tiny"]),
    "rearag": ([("", "no_reasoning", "tiny")], ["parity"]),
}
SPECS = [
    f"configs/{recipe}.py:{','.join(w for w in words if w)}".rstrip(":")
    for recipe, (choices, flags) in CHOICES.items()
    for words in itertools.product(*choices, *((flag, "") for flag in flags))
]
FEW = [  # each word alone, with the public code's settings, and on the embedded world
    f"configs/{recipe}.py:{','.join(dict.fromkeys(w for w in words if w))}".rstrip(":")
    for recipe, (choices, flags) in CHOICES.items()
    for words in itertools.product(
        ["", *(w for group in choices for w in group), *flags], ["", "parity", "tiny"]
    )
    if not {"no_reasoning", "tiny"} <= {*words}  # these exclude each other
]
QWEN_7B, QWEN_7B_CHAT = "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct"
QWEN_72B, QWQ = "Qwen/Qwen2.5-72B-Instruct", "Qwen/QwQ-32B-Preview"
BGE, E5 = "BAAI/bge-large-en-v1.5", "intfloat/e5-base-v2"
EPOCH = 4561 + 3587  # questions of R1-Searcher's second stage, Table 1
PAPER = {  # (recipe and words, stage) -> {field: number in the paper}
    ("search_r1", "rl"): {  # arXiv 2503.09516, section 4.3 and appendix
        "rl.algorithm": "ppo",
        "rl.lr": 1e-6,
        "critic.lr": 1e-5,
        "rl.steps": 500,
        "rl.questions_per_step": 512,
        "rl.updates_per_step": 512 // 256,
        "rl.warmup_steps": int(0.285 * 500) * 2,
        "critic.warmup_steps": int(0.015 * 500) * 2,
        "rl.gamma": 1.0,
        "rl.gae_lambda": 1.0,
        "rl.kl_coef": 0.001,
        "rl.clip_low": 0.2,
        "rl.clip_high": 0.2,
        "rollout.max_searches": 4,
        "rollout.max_turn_tokens": 500,
        "rollout.max_observation_tokens": 500,
        "rollout.temperature": 1.0,
        "rollout.top_p": 1.0,
        "retrieval.encoder": E5,
        "retrieval.top_k": 3,
    },
    ("search_r1:grpo", "rl"): {"rollout.group_size": 5, "rl.algorithm": "grpo"},
    ("search_r1:format,ppo", "rl"): {"rl.lr": 1e-6},  # v0.3/train_ppo_format.sh
    ("search_r1:format,grpo", "rl"): {"rl.lr": 5e-7},  # v0.3/train_grpo_format.sh
    ("rag_r1", "curate_sft"): {"model.source": QWEN_72B},  # section 3.1.1
    ("rag_r1", "curate_rl"): {  # section 3.2.1
        "model.source": QWEN_72B,
        "curate.retry_temperature": 1.2,
        "curate.retry_searches": 10,
        "curate.retry_rollouts": 10,
        "curate.right_share": 0.25,
    },
    ("rag_r1:no_filter", "curate_rl"): {  # section 5
        "curate.retry_rollouts": 0,
        "curate.right_share": 0.25,
    },
    ("rag_r1:tiny,no_filter", "curate_rl"): {
        "curate.retry_rollouts": 0,
        "curate.right_share": 0.25,
    },
    ("rag_r1", "sft"): {  # appendix A
        "sft.steps": 5 * (19_303 * 95 // 100 // 64),
        "sft.sequence_tokens": 8192 + 2048,
        "sft.validation_share": 0.05,
        "sft.keep": "lowest_loss",
    },
    ("rag_r1:sq", "sft"): {"sft.steps": 5 * (18_994 * 95 // 100 // 64)},
    ("rag_r1", "rl"): {  # appendix A
        "model.source": QWEN_7B_CHAT,
        "rl.algorithm": "ppo",
        "rl.lr": 1e-6,
        "critic.lr": 1e-5,
        "rl.steps": 500,
        "rl.questions_per_step": 512,
        "rl.updates_per_step": 512 // 128,
        "rl.warmup_steps": int(0.285 * 500) * 4,
        "critic.warmup_steps": int(0.015 * 500) * 4,
        "rl.gamma": 1.0,
        "rl.gae_lambda": 1.0,
        "rollout.max_turn_tokens": 500,
        "rollout.max_observation_tokens": 1000,
        "rollout.max_searches": 4,
        "retrieval.encoder": BGE,
        "retrieval.top_k": 3,
    },
    ("r1_searcher", "rl_retrieve"): {"rl.steps": (200 + 150) // 64},  # Table 1
    ("r1_searcher", "rl_answer"): {  # section 3.3
        "model.source": QWEN_7B,
        "rl.algorithm": "reinforce_pp",
        "rollout.group_size": 16,
        "rl.questions_per_step": 64,
        "rl.updates_per_step": 64 * 16 // 256,
        "rl.steps": EPOCH // 64,
        "rl.lr": 2e-6,
        "rollout.temperature": 1.0,
        "rollout.max_searches": 8,
        "rl.kl_coef": 0.0,
        "rl.gamma": 1.0,
        "retrieval.encoder": BGE,
    },
    ("r1_searcher:llama", "rl_answer"): {
        "model.source": "meta-llama/Llama-3.1-8B-Instruct",
        "rl.kl_coef": 1e-4,
    },
    ("r1_searcher:select", "curate_retrieve"): {  # section 2.1
        "model.source": QWEN_7B_CHAT,
        "curate.easy_below": 10,
        "curate.hard_above": 20,
        "curate.mix": ("hotpotqa medium 200", "2wikimultihopqa medium 150"),
    },
    ("r1_searcher_pp", "sft"): {  # appendix A
        "model.source": QWEN_7B_CHAT,
        "sft.steps": 6 * (720 + 85) // 64,
        "sft.batch_size": 64,
        "sft.lr": 2e-5,
    },
    ("r1_searcher_pp", "rl"): {  # appendix A
        "rollout.group_size": 16,
        "rl.questions_per_step": 64,
        "rl.updates_per_step": 64 * 16 // 1024,
        "rl.steps": (4561 + 3581) // 64,
        "rl.lr": 2e-6,
        "rollout.temperature": 1.0,
        "rollout.top_p": 0.95,
        "rollout.max_searches": 8,
        "rl.kl_coef": 1e-4,
        "rl.memorise_coef": 0.1,
        "retrieval.encoder": BGE,
    },
    ("r_search", "rl"): {  # section 4.3
        "data.train": "data/2wikimultihopqa/train.json",
        "rl.algorithm": "grpo",
        "rl.steps": 195,
        "rl.questions_per_step": 256,
        "retrieval.top_k": 3,
        "rl.lr": 1e-6,
        "rl.warmup_steps": int(0.95 * 195),
        "rollout.group_size": 5,
        "rl.kl_coef": 0.001,
        "models.judge.source": "meta-llama/Llama-3.2-3B-Instruct",
        "model.source": QWEN_7B_CHAT,
        "retrieval.encoder": E5,
    },
    ("r_search:3b", "rl"): {"model.source": "Qwen/Qwen2.5-3B-Instruct"},
    ("r_search:ppo,7b,parity", "rl"): {  # scripts/train_ppo_7b.sh
        "rl.steps": 120,
        "rl.warmup_steps": int(0.95 * 120),
        "critic.warmup_steps": int(0.05 * 120),
    },
    ("r_search:ppo,3b,parity", "rl"): {  # scripts/train_ppo_3b.sh
        "rl.steps": 195,
        "rl.warmup_steps": int(0.95 * 195),
        "critic.warmup_steps": int(0.05 * 195),
    },
    ("rearag", "curate"): {"model.source": QWQ, "curate.observations": "gold"},
    ("rearag", "sft"): {  # section 4.2
        "model.source": "zai-org/glm-4-9b-chat-hf",
        "models.writer.name": "GLM-4-32B",
    },
}
REFLECTING = (  # section 2.1 of R1-Searcher
    "decomposing, reflecting, brainstorming, verifying, refining, and revising",
    "search query (only keywords) here",
)
TEACHERS = {  # (recipe and words, stage) -> phrases of the prompt its paper prints
    ("rearag", "curate"): (  # appendix B, P_d
        "reasoning processes following this sequence: Thought, Action, Observation",
        "(6) You should not provide information based on your own knowledge, only use",
        '"Missing information. Let me restructure my query."',
    ),
    ("r1_searcher:select", "curate_retrieve"): REFLECTING,
    ("r1_searcher:select", "curate_answer"): REFLECTING,
}
REWARDS = {  # recipe and words -> {stage: its terms in the paper}
    "search_r1": {"rl": {"answer_em": {}}},
    "search_r1:format": {  # arXiv 2505.15117
        "rl": {
            "search_r1_structure": {"structure": 0.2, "final": 0.1, "retrieval": 0.1}
        }
    },
    "rag_r1": {"rl": {"answer_em": {}}},
    "r1_searcher": {
        "rl_retrieve": {
            "searched": {"value": 0.5},
            "r1_searcher_format": {"good": 0.5, "bad": 0.0},
        },
        "rl_answer": {
            "answer_f1": {"normalize": "r1_searcher"},
            "r1_searcher_format": {"good": 0.0, "bad": -2.0},
        },
    },
    "r_search": {
        "rl": {
            "answer_f1": {},
            "evidence_f1": {},
            "r_search_format": {"evidence": 0.2, "answer": 0.2},
        },
    },
}


def loaded(spec):
    recipe, _, words = spec.partition(":")
    return configuration.load(f"configs/{recipe}.py" + (f":{words}" if words else ""))


@pytest.mark.parametrize("spec, stage", PAPER, ids=":".join)
def test_a_recipe_has_the_numbers_of_its_paper(spec, stage):
    config = dict(stage_configs(loaded(spec)))[stage]
    expected = PAPER[spec, stage]
    assert {field: _value(config, field) for field in expected} == expected


def _value(config, field):
    for key in field.split("."):
        config = config[key]
    return config


@pytest.mark.parametrize("words", ["", "no_reasoning", "parity", "tiny"])
def test_rearag_learns_chains_of_as_many_steps_as_are_made(words):
    config = loaded(f"rearag:{words}" if words else "rearag")
    limits = configured_limits(stage_config(config, "sft"))
    assert limits.num_turns == stage_config(config, "curate").curate.max_steps
    # The policy itself takes fifteen steps, as in the public code.
    assert words == "tiny" or configured_limits(config).num_turns == 15


@pytest.mark.parametrize("spec, stage", TEACHERS, ids=":".join)
def test_a_stage_that_makes_data_uses_its_papers_prompt(spec, stage):
    asked = policy_protocol(stage_config(loaded(spec), stage)).messages("Who?")
    assert [message["role"] for message in asked] == ["system", "user"]
    for phrase in TEACHERS[spec, stage]:
        assert phrase in asked[0]["content"]


def test_no_other_stage_uses_a_teachers_prompt():
    """Training stages keep their protocol's prompt, as do the world's small models."""
    small = ("rearag:tiny", "r1_searcher:select,tiny")
    for spec in ("rearag", "rearag:no_reasoning", "r1_searcher:select", *small):
        for stage, own in stage_configs(loaded(spec)):
            if (spec, stage) not in TEACHERS:
                assert own.protocol.system is None, (spec, stage)


@pytest.mark.parametrize("spec", REWARDS)
def test_a_recipe_has_the_rewards_of_its_paper(spec):
    stages = dict(stage_configs(loaded(spec)))
    actual = {stage: stages[stage].reward.to_dict() for stage in REWARDS[spec]}
    assert actual == REWARDS[spec]


def test_search_r1_rewards_retrieval_only_where_its_paper_does():
    words = ("format", "format,parity", "format,tiny", "format,parity,tiny")
    rewards = [loaded(f"search_r1:{w}").reward.search_r1_structure for w in words]
    assert [reward.retrieval for reward in rewards] == [0.1, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "spec",
    [
        *("search_r1:ppo", "search_r1:format", "rag_r1:mq", "rag_r1:sq"),
        *("r_search:grpo", "r_search:ppo", "r_search:no_evidence"),
        *(f"r1_searcher:qwen,{answer}" for answer in ("f1", "cem", "em")),
        *(f"r1_searcher:llama,{answer}" for answer in ("f1", "cem", "em")),
    ],
)
def test_answers_that_normalise_to_nothing_match_only_under_parity(spec):
    for is_parity in (False, True):
        actual = [
            settings.get("empty_matches", False)
            for _, own in stage_configs(loaded(spec + ",parity" * is_parity))
            for name, settings in own.reward.items()
            if "empty_matches" in inspect.signature(TERMS[name]).parameters
        ]
        assert actual and set(actual) == {is_parity}


@pytest.mark.fault(92, "cap of k3")
@pytest.mark.parametrize("spec", ["search_r1", "rag_r1", "r_search"])
def test_k3_is_capped_as_in_verl_only_under_parity(spec):
    for words, cap in (("grpo", 0), ("grpo,parity", 10), ("ppo,parity", 0)):
        assert loaded(f"{spec}:{words}").rl.kl_cap == cap


@pytest.mark.parametrize(
    "spec, rows", [("search_r1", 8), ("rag_r1", 4), ("r_search", 8)]
)
def test_parity_averages_over_one_devices_share_of_the_micro_batch(spec, rows):
    for word in ("ppo", "grpo"):
        rl = stage_config(loaded(f"{spec}:{word},parity"), "rl").rl
        assert (rl.loss_mean, rl.micro_batch) == ("micro_token", rows)


def test_r1_searcher_pp_rewards_the_fewest_searches_with_at_most_two():
    reward = loaded("r1_searcher_pp").reward.to_dict()
    assert reward["group_fewest_searches"]["eta"] == 2.0
    assert reward["answer_cover_em"]["max_words"] == 10
    assert reward["r1_searcher_pp_format"] == {"good": 0.0, "bad": -2.0}


@pytest.mark.parametrize("spec", ["r1_searcher_pp", "r1_searcher_pp:parity"])
def test_r1_searcher_pp_has_one_definition_of_right_in_data_and_reward(spec):
    whole = loaded(spec)
    reward = whole.reward.answer_cover_em.to_dict()
    for stage in ("curate_sft", "curate_rewriter"):
        own = stage_config(whole, stage).curate
        assert own.measure == "cover_em"
        assert {name: own[name] for name in reward} == reward


def test_stages_are_those_of_the_papers():
    stages = {recipe: loaded(recipe).stages for recipe in CHOICES}
    assert stages == {
        "search_r1": ("rl",),
        "rag_r1": ("curate_sft", "sft", "curate_rl", "rl"),
        "r1_searcher": ("rl_retrieve", "rl_answer"),
        "r1_searcher_pp": (
            "curate_sft",
            "sft",
            "curate_rewriter",
            "sft_rewriter",
            "rl",
        ),
        "r_search": ("rl",),
        "rearag": ("curate", "sft"),
    }


def check(specs):
    """Check that each is valid, has a dry run, and has a name of its own."""
    names = set()
    for spec in specs:
        config = configuration.load(spec)
        dry_run(config)  # validates every stage
        names.add(config.name)
        for _, own in stage_configs(config):
            assert own.protocol.name in PROTOCOLS
            check_terms(own.reward, has_judge=bool(own.models.judge.source))
    assert len(names) == len(specs)  # runs of two variants never share a directory


@pytest.fixture
def no_tables(monkeypatch):
    monkeypatch.setattr("rsearch.runtime.console.table", lambda *args: None)


def test_every_word_is_valid_and_has_a_dry_run(no_tables):
    check(set(FEW))


@pytest.mark.slow
def test_every_combination_of_words_is_valid_and_has_a_dry_run(no_tables):
    assert len(SPECS) == 64 + 48 + 288 + 48 + 32 + 6
    check(SPECS)


def test_an_unknown_word_is_refused_with_the_list():
    with pytest.raises(
        ValueError, match=r"unknown variant 'sp': one of mq, sq; one of"
    ):
        loaded("rag_r1:sp")


def test_words_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match="'sq' and 'mq' exclude each other"):
        loaded("rag_r1:sq,mq")
    with pytest.raises(ValueError, match="'3b' and '7b' exclude each other"):
        loaded("r_search:ppo,3b,7b")


def test_a_word_given_twice_is_refused():
    with pytest.raises(ValueError, match="'tiny' is given twice"):
        loaded("rearag:tiny,tiny")


def test_words_are_read_by_choice_and_flag():
    settings = {"choices": {"size": ("s", "l")}, "flags": ("fast",)}
    assert vars(variants.parse_variant("", **settings)) == {"size": "s", "fast": False}
    assert vars(variants.parse_variant(" l , fast", **settings)) == {
        "size": "l",
        "fast": True,
    }
    with pytest.raises(ValueError, match="'l' and 'fast' exclude each other"):
        variants.parse_variant("l,fast", **settings, clashes=[("l", "fast")])
    with pytest.raises(ValueError, match="unknown variant 'x': there are none"):
        variants.parse_variant("x")


@pytest.mark.parametrize(
    "recipe", [*CHOICES, "rag_r1:grpo", "rag_r1:sq", "r_search:ppo"]
)
def test_a_recipe_fits_eight_devices_of_80_gb(recipe, capsys):
    dry_run(loaded(recipe), devices=8, device_memory_gb=GPU_SHARE * 80)
    assert "peak on each of 8 devices" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["", ",tiny"])
def test_the_selected_questions_are_the_ones_trained_on(size):
    config = loaded(f"r1_searcher:select{size}")
    for stage in ("retrieve", "answer"):
        train = stage_config(config, f"rl_{stage}").data.train
        assert train == f"stage:curate_{stage}"
