"""Settings that do not fit together are refused with a reason before compilation."""

import pytest

from rsearch.config import recipes as configs
from rsearch.config.spec import base_fields
from rsearch.config.stage_plan import ROLES
from rsearch.stages.curate import run

BASE = configs.load("configs/base.py")
VALUES = {n: v for n, v in configs.fields(BASE).items() if not n.startswith("reward.")}
NUMBERS = sorted(n for n, v in VALUES.items() if type(v) in (int, float))
PARAGRAPHS = {"data__dev": "q.jsonl", "data__train": "q.jsonl", "stages": ("rl",)}
PARAGRAPHS |= {"retrieval__corpus": "paragraphs"}


def override(**fields):
    pairs = {name.replace("__", "."): value for name, value in fields.items()}
    return configs.apply_overrides(BASE, pairs)


def refusal(**fields):
    """Return why `validate` refuses the defaults with these fields."""
    with pytest.raises(ValueError) as caught:
        configs.validate(override(**fields))
    return str(caught.value)


def test_every_number_has_a_bound_and_every_field_a_meaning():
    assert all(base_fields()[name].bound for name in NUMBERS)
    assert all(field.meaning for field in base_fields().values())


def test_every_default_is_within_its_bound():
    bounded = [field for field in base_fields().values() if field.bound]
    assert all(field.bound.allows(field.default) for field in bounded)


def test_every_curation_method_is_allowed_and_named_in_a_refusal():
    for name in run.METHODS:
        assert base_fields()["curate.method"].bound.allows(name)
    told = refusal(curate__method="nonsense")
    assert all(repr(name) in told for name in run.METHODS)


@pytest.mark.fault(3, "negative steps", "NaN")
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_not_finite_or_far_below_its_range_is_refused(name):
    bad = [-7] if type(VALUES[name]) is int else [-7.0, float("nan"), float("inf")]
    for value in bad:
        told = refusal(**{name.replace(".", "__"): value})
        assert told.startswith(f"config.{name} = {value!r}: must be ")


@pytest.mark.fault(3, "clip of 0")
@pytest.mark.parametrize("name", ["rl.clip_low", "rl.clip_high"])
def test_a_clip_range_of_zero_is_refused(name):
    told = refusal(**{name.replace(".", "__"): 0.0})
    assert told.startswith(f"config.{name} = 0.0: must be ")


@pytest.mark.parametrize(
    "name", sorted(name for name in NUMBERS if name.endswith("temperature"))
)
def test_a_temperature_that_makes_logits_infinite_is_refused(name):
    told = refusal(**{name.replace(".", "__"): 1e-38})
    assert told.startswith(f"config.{name} = 1e-38: must be ")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (dict(eval__samples=2), "config.eval.temperature = 0"),
        (dict(eval__seeds=2), "config.eval.temperature = 0"),
        (dict(eval__top_p=0.5), "config.eval.top_p = 0.5"),
        (
            dict(
                eval__samples=2,
                eval__temperature=0.7,
                models__subject__source="http://localhost/v1",
                models__subject__name="m",
            ),
            "config.models.subject.temperature = 0",
        ),
        (
            dict(
                eval__samples=2,
                eval__temperature=0.7,
                eval__methods=("protocol", "reader_rag"),
                models__reader__source="r",
            ),
            "'reader_rag'",
        ),
    ],
)
def test_samples_that_would_all_be_the_same_are_refused(fields, named):
    assert named in refusal(**fields)
    configs.validate(override(eval__samples=2, eval__seeds=2, eval__temperature=0.7))


@pytest.mark.parametrize(
    ("name", "value", "need", "needed"),
    [
        ("model.lora_alpha", 32.0, "model.lora_rank", 4),
        ("model.lora_matrices", ("q",), "model.lora_rank", 4),
        ("retrieval.api", "rearag", "retrieval.url", "http://localhost"),
        ("retrieval.api_key_env", "KEY", "retrieval.url", "http://localhost"),
        ("retrieval.rerank_from", 20, "retrieval.reranker", "reranker"),
        ("eval.answer_from", "log", "models.answerer.source", "world:answerer"),
        ("models.judge.api_key_env", "KEY", "models.judge.source", "http://localhost"),
        ("models.judge.max_retries", 2, "models.judge.source", "http://localhost"),
        ("retrieval.max_retries", 2, "retrieval.url", "http://localhost"),
        ("sft.chats_share", 0.1, "sft.chats", "chats.jsonl"),
        ("models.judge.top_p", 0.5, "models.judge.temperature", 1.0),
        ("rl.gamma", 0.9, "rl.algorithm", "ppo"),
        ("rl.gae_lambda", 0.9, "rl.algorithm", "ppo"),
        ("rl.kl_cap", 10.0, "rl.kl_kind", "k3"),
        ("rl.kl_credit", "token", "rl.kl_place", "reward"),
        ("rl.loss_tokens", 10, "rl.loss_mean", "constant"),
    ],
)
def test_a_field_that_another_makes_ineffective_is_refused(name, value, need, needed):
    fields = {"stages": ("sft", "rl"), "rl.kl_kind": "k1", name: value}
    with pytest.raises(ValueError) as caught:
        configs.check_effective(configs.apply_overrides(BASE, fields))
    assert f"config.{name} = {value!r} has no effect" in str(caught.value)
    assert f"config.{need}" in str(caught.value)
    configs.check_effective(configs.apply_overrides(BASE, fields | {need: needed}))


def test_a_field_that_one_stage_uses_is_effective():
    fields = {"stages": ("rl", "rl_2"), "rl.gamma": 0.9}
    fields["overrides"] = {"rl_2": {"rl": {"algorithm": "ppo"}}}
    configs.check_effective(configs.apply_overrides(BASE, fields))


def test_ppo_whose_policy_would_learn_in_no_step_is_refused():
    def check(**fields):
        changes = {name.replace("__", "."): value for name, value in fields.items()}
        configs.check_effective(configs.apply_overrides(BASE, changes))

    ppo = {"stages": ("rl", "rl_2"), "overrides": {"rl_2": {"rl": {"steps": 2}}}}
    ppo |= {"rl__algorithm": "ppo", "rl__steps": 4}
    check(**ppo, critic__pretrain_steps=1)
    for steps in (2, 3):
        with pytest.raises(ValueError) as caught:
            check(**ppo, critic__pretrain_steps=steps)
        assert f"config.critic.pretrain_steps = {steps}" in str(caught.value)
        assert "config.rl.steps = 2" in str(caught.value)
    check(**ppo | {"rl__algorithm": "grpo"}, critic__pretrain_steps=9)


def test_difficulties_that_overlap_are_refused_for_both_methods():
    for method in ("difficulty", "mix"):
        told = refusal(stages=("curate",), curate__method=method, curate__easy_below=30)
        assert "config.curate.easy_below = 30" in told


def test_a_set_of_questions_is_checked_before_the_run_that_it_follows():
    told = refusal(sets={"mine": {"data": {"devv": "x.jsonl"}}})
    assert told.startswith("config.sets.mine: unknown field config.data.devv")
    configs.validate(override(sets={"mine": {"data": {"dev": "x.jsonl"}}}))


def test_an_unknown_choice_is_refused_with_the_known_ones():
    told = refusal(rl__kl_kind="nonsense")
    assert all(repr(word) in told for word in ("k1", "k2", "k3"))


@pytest.mark.parametrize("name", ROLES)
def test_an_endpoint_needs_a_model_name_and_a_url_without_secrets(name):
    told = refusal(**{f"models__{name}__source": "http://localhost/v1"})
    assert f"config.models.{name}.name = ''" in told
    for secret in ("https://me:s3cret@host/v1", "https://host/v1?key=s3cret"):
        told = refusal(
            **{f"models__{name}__source": secret, f"models__{name}__name": "m"}
        )
        assert f"config.models.{name}.api_key_env" in told and "s3cret" not in told


@pytest.mark.parametrize("name", ROLES)
def test_a_shared_program_leaves_no_devices_for_a_local_model(name):
    asked = {f"models__{name}__source": "org/model", "rollout__global_mesh": True}
    assert f"config.models.{name}.source = 'org/model' would run on" in refusal(**asked)


def test_a_subject_must_be_at_an_endpoint():
    refused = refusal(models__subject__source="org/model")
    assert refused.startswith("config.models.subject.source = 'org/model'")
    refused = refusal(eval__scored_by="policy")
    assert refused.startswith("config.eval.scored_by = 'policy' has no effect")


@pytest.mark.parametrize("site", ["en.wikipedia.org", "a.org OR b.org"])
def test_a_site_is_a_host_name_and_needs_a_web_search(site):
    web = dict(retrieval__url="http://localhost")
    web |= dict(retrieval__api="serper" if " " in site else "rearag")
    refused = refusal(retrieval__site=site, **web)
    assert refused.startswith(f"config.retrieval.site = {site!r}")


@pytest.mark.parametrize("stages", [(), ("rl", "rl"), ("rl", "ppo")])
def test_stages_are_known_and_given_once(stages):
    assert refusal(stages=stages).startswith("config.stages = ")


@pytest.mark.fault(4, "batch", "arithmetic shown")
def test_a_micro_batch_that_does_not_divide_is_refused_with_the_remainder():
    told = refusal(
        stages=("rl",),
        rollout__group_size=4,
        rollout__max_concurrent=8,
        rl__questions_per_step=6,
        rl__updates_per_step=2,
        rl__micro_batch=5,
    )
    for part in ("rl.micro_batch = 5", "6 questions x 4 rollouts = 24 rows", "10 rows"):
        assert part in told
    assert "remainder 4" in told and told.endswith("; 4 does")


@pytest.mark.fault(3, "group of one")
@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"model__num_heads": 6, "model__num_kv_heads": 4},
            "num_heads = 6 is not a multiple of config.model.num_kv_heads = 4",
        ),
        (
            {"stages": ("rl",), "rollout__group_size": 1, "rollout__max_concurrent": 1},
            "rollout.group_size = 1: must be >= 2",
        ),
        (
            {"stages": ("sft",), "sft__batch_size": 10, "sft__micro_batch": 4},
            "sft.batch_size = 10 is not a multiple of config.sft.micro_batch = 4",
        ),
        (
            {"sft__decay": True, "sft__steps": 5, "sft__warmup_steps": 5}
            | {"stages": ("sft",)},
            "sft.warmup_steps = 5 leaves no room for the decay in config.sft.steps",
        ),
        (
            {"sft__keep": "lowest_loss", "stages": ("sft",)},
            "sft.keep = 'lowest_loss' needs config.sft.validation_share > 0",
        ),
        (
            {"model__source": "x", "tokenizer__source": "world"},
            "'world' does not belong to config.model.source = 'x'",
        ),
        (
            {"retrieval__index": "x", "retrieval__corpus": "world"},
            "retrieval.index = 'x' is not an index of config.retrieval.corpus",
        ),
        ({"retrieval__bm25_index": "x"}, "config.retrieval.index = '' names none"),
        (
            {"retrieval__corpus_words": 9},
            "corpus_words = 9 applies only to config.retrieval.corp",
        ),
        (PARAGRAPHS | {"retrieval__index": "x"}, "retrieval.index = 'x'"),
        (PARAGRAPHS | {"retrieval__url": "http://x"}, "retrieval.url = 'http://x'"),
        (PARAGRAPHS | {"retrieval__engine": "a.b:c"}, "retrieval.engine = 'a.b:c'"),
        (PARAGRAPHS | {"retrieval__sharded": True}, "retrieval.sharded = True"),
        (PARAGRAPHS | {"retrieval__bm25_index": "x"}, "retrieval.bm25_index = 'x'"),
        (PARAGRAPHS | {"protocol__tools": ("open",)}, "protocol.tools = ('open',)"),
        ({"retrieval__sharded": True}, "config.retrieval.index = '' names none"),
        ({"retrieval__on_devices": True}, "config.retrieval.index = '' names none"),
        (
            {
                "retrieval__index": "x",
                "retrieval__corpus": "",
                "data__train": "x",
                "data__dev": "x",
                "retrieval__sharded": True,
                "retrieval__on_devices": True,
            },
            "config.retrieval.on_devices = True and config.retrieval.sharded = True",
        ),
        (
            {"retrieval__url": "http://x", "retrieval__search_seconds": 325.0},
            "config.retrieval.search_seconds = 325.0 ends too soon for its service to",
        ),
        (
            {"stages": ("rl",), "rollout__top_p": 0.9},
            "top_p = 0.9 needs config.rl.old_logprobs = 'recompute'",
        ),
        ({"tokenizer__source": "", "model__source": ""}, "are both empty"),
        (
            {"stages": ("curate",), "curate__method": "self_rag"},
            "config.curate.labels = ''",
        ),
        (
            {
                "stages": ("curate",),
                "curate__method": "oracle",
                "models__writer__source": "model",
            },
            "config.models.writer.source = 'model'",
        ),
        (
            {
                "stages": ("curate",),
                "curate__method": "difficulty",
                "curate__rollouts": 19,
            },
            "curate.rollouts = 19 cannot tell which questions need more",
        ),
        (
            {
                "stages": ("curate",),
                "curate__method": "difficulty",
                "curate__rollouts": 20,
                "curate__easy_below": 22,
            },
            "curate.easy_below = 22 and config.curate.hard_above = 20 overlap",
        ),
        (
            {"stages": ("rl",), "rl__mask_retrieved": False},
            "rl.mask_retrieved = False needs config.rl.old_logprobs = 'recompute'",
        ),
        (
            {"stages": ("rl",), "rl__tis_cap": 2.0},
            "rl.tis_cap = 2.0 needs config.rl.old_logprobs = 'recompute'",
        ),
        (
            {"stages": ("rl",), "rl__loss": "my_loss:f", "rl__dual_clip": 3.0},
            "rl.dual_clip = 3.0 applies only to the clipped surrogate",
        ),
        (
            {"stages": ("rl",), "rl__loss": "my_loss:f", "rl__ratio": "sequence"},
            "rl.ratio = 'sequence' applies only to the clipped surrogate",
        ),
        (
            {"stages": ("rl",), "rl__kl_controller": "adaptive"},
            "'adaptive' needs config.rl.kl_coef > 0",
        ),
        (
            {"stages": ("rl",), "rl__mask_retrieved": False, "rl__tis_cap": 2.0}
            | {"rl__old_logprobs": "recompute"},
            "mask_retrieved = False does not go with config.rl.tis_cap = 2.0",
        ),
        (
            {"stages": ("rl",), "rl__memorise_coef": 0.1, "rl__memorise_rows": 128},
            "name one in config.models.rewriter.source",
        ),
        (
            {"stages": ("rl",), "rl__memorise_coef": 0.1, "rl__memorise_rows": 100},
            "memorise_rows = 100 is not a multiple of config.rl.micro_batch = 128",
        ),
        (
            {"model__lora_rank": 4, "model__offload": ("optimizer", "reference")},
            "with config.model.lora_rank = 4 the reference is the adapters' frozen",
        ),
        (
            {"guards__max_kl": 1.0, "rl__kl_coef": 0.0},
            "config.guards.max_kl = 1.0: with config.rl.kl_coef = 0 no KL is measured",
        ),
        (
            {"model__offload": ("weights",)},
            "config.model.offload",
        ),
        (
            {"optim__moments_dtype": "bfloat16", "optim__b2": 0.999},
            "config.optim.b2 = 0.999: must be <= 0.996 with config.optim.moments_dtype",
        ),
        (
            dict(rollout__devices=2, rl__max_staleness=0),
            "config.rollout.devices = 2 wait for the others",
        ),
        (
            dict(rollout__devices=3, mesh__tensor=2, rl__max_staleness=1),
            "config.rollout.devices = 3 is not a multiple of config.mesh.tensor = 2",
        ),
        (
            dict(rollout__devices=2, rollout__global_mesh=True, rl__max_staleness=1),
            "does not go with config.rollout.global_mesh = True",
        ),
        (
            dict(rl__max_staleness=1, rl__old_logprobs="recompute"),
            "needs config.rl.tis_cap > 0",
        ),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(fields, message):
    assert message in refusal(**fields)


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_pp"])
def test_an_algorithm_that_compares_no_groups_needs_none(algorithm):
    alone = dict(rollout__group_size=1, rl__micro_batch=32, rl__algorithm=algorithm)
    configs.validate(override(stages=("rl",), **alone))
    assert "must be >= 2" in refusal(
        stages=("rl",), rl__dynamic_sampling_rounds=1, **alone
    )


@pytest.mark.parametrize("slots", [3, 10, 16])
def test_max_concurrent_need_not_be_a_multiple_of_the_group_size(slots):
    configs.validate(override(rollout__max_concurrent=slots, rollout__group_size=4))


@pytest.mark.fault(4, "mesh")
def test_the_mesh_must_use_all_devices():
    config = override(mesh__data=2, mesh__fsdp=2, mesh__tensor=1)
    configs.validate(config, num_devices=4)
    with pytest.raises(ValueError, match="2 x fsdp 2 x tensor 1, but there are 8 dev"):
        configs.validate(config, num_devices=8)
    configs.validate(override(mesh__data=-1), num_devices=8)


def test_devices_reserved_for_rollouts_are_not_part_of_the_mesh():
    ahead = override(rl__max_staleness=1, rollout__devices=2, mesh__fsdp=2)
    configs.validate(ahead, num_devices=4)
    with pytest.raises(ValueError, match="leave none of the 2 devices to learn on"):
        configs.validate(ahead, num_devices=2)
    with pytest.raises(ValueError, match=r"are 1 devices besides config.rollout.devi"):
        configs.validate(ahead, num_devices=3)
    configs.validate(override(rl__max_staleness=1), num_devices=1)
    with pytest.raises(ValueError, match="= 1 on 8 devices: rollouts during updates"):
        configs.validate(override(rl__max_staleness=1), num_devices=8)
