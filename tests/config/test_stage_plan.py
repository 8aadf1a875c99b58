"""The plan of a run: its stages, their overrides, and the files that they pass on."""

import pytest

from rsearch.config import recipes as configs
from rsearch.config.stage_plan import (
    check_plan,
    earlier_stages,
    is_stage,
    kind_of,
    kinds,
    stage_config,
    stage_configs,
    stage_file,
)

BASE = configs.load("configs/base.py")


def planned(*stages, overrides=None, **fields):
    """Return the defaults with these stages; `__` in a field's name means a dot."""
    changes = {name.replace("__", "."): value for name, value in fields.items()}
    changes |= {"stages": stages, "overrides": overrides or {}}
    return configs.apply_overrides(BASE, changes)


def test_a_stages_name_is_its_kind_with_an_optional_suffix():
    good = ("rl", "sft", "curate", "rl_answer", "sft_2", "curate_a_b")
    bad = ("", "ppo", "rl_", "rlx", "RL", "rl-a", "rl_A", "rl/..", "rl_a\n", None, 3)
    assert all(map(is_stage, good)) and not any(map(is_stage, bad))
    assert [kind_of(name) for name in ("rl", "curate_a_b")] == ["rl", "curate"]
    assert kinds(planned("sft_a", "rl", "rl_b")) == {"sft", "rl"}


def test_a_stages_configuration_has_its_overrides_and_no_other_stage():
    own = {"rl_b": {"rl": {"steps": 7}, "reward": {"answer_f1": {}}}}
    whole = planned("rl_a", "rl_b", overrides=own)
    (name_a, a), (name_b, b) = stage_configs(whole)
    assert (name_a, name_b) == ("rl_a", "rl_b")
    assert (a.stages, b.stages) == (("rl_a",), ("rl_b",))
    assert not a.overrides and not b.overrides
    assert (a.rl.steps, b.rl.steps) == (BASE.rl.steps, 7)
    assert a.reward == BASE.reward and b.reward.to_dict() == {"answer_f1": {}}
    assert {name for name, _, _ in configs.diff(a, b)} == {
        *("stages", "rl.steps", "reward.answer_em.weight", "reward.answer_f1"),
    }
    # The run's configuration is unchanged.
    assert whole.rl.steps == BASE.rl.steps and whole.overrides.rl_b.rl.steps == 7


def test_wrong_overrides_are_refused_by_name():
    with pytest.raises(ValueError, match=r"did you mean .*rl\.steps"):
        stage_config(planned("rl", overrides={"rl": {"rl": {"step": 1}}}), "rl")
    with pytest.raises(ValueError, match=r"config\.overrides\.ppo is for no stage"):
        stage_configs(planned("rl", overrides={"ppo": {"rl": {"steps": 1}}}))
    # Overrides of a stage that a variant leaves out are allowed.
    waiting = planned("rl", overrides={"sft": {"sft": {"steps": 1}}})
    assert [name for name, _ in stage_configs(waiting)] == ["rl"]


@pytest.mark.parametrize("name", ["stages", "name", "eval.methods", "eval.samples"])
def test_an_override_of_a_field_that_all_stages_share_is_refused(name):
    setting = {name: ("rl",)} if name == "stages" else {}
    section, _, field = name.partition(".")
    setting = setting or {section: {field: "x"} if field else "x"}
    run = planned("rl", overrides={"rl": setting})
    with pytest.raises(ValueError, match=rf"config\.overrides\.rl\.{name} has no"):
        configs.check_effective(run)
    own = {"rl": {"eval": {"every_steps": 2}}}
    configs.check_effective(planned("rl", overrides=own))


NAMED = {
    "data__train": "stage:curate_a",
    "curate__first": "stage:curate_b",
    "sft__demonstrations": "stage:curate_c",
    "models__rewriter__source": "stage:sft_d",
    "models__judge__source": "stage:sft_e",
    "models__writer__source": "world:expert",
    "models__answerer__source": "http://localhost",
    "models__reader__source": "stage:sft_f",
}


@pytest.mark.parametrize(
    "stage, read",
    [
        ("curate", ["curate_a", "curate_b", "sft_f"]),
        ("sft", ["curate_a", "curate_c", "sft_f"]),
        ("rl", ["curate_a", "sft_d", "sft_e", "sft_f"]),
    ],
)
def test_a_stage_depends_on_the_stages_that_its_kind_reads(stage, read):
    assert sorted(earlier_stages(planned(stage, **NAMED))) == read
    assert earlier_stages(planned(stage)) == []


def test_a_stage_read_twice_is_named_once():
    both = planned(
        "rl", models__judge__source="stage:sft_a", models__reader__source="stage:sft_a"
    )
    assert earlier_stages(both) == ["sft_a"]


def test_a_source_is_a_path_or_the_file_of_a_stage(tmp_path):
    assert stage_file("some/file.jsonl", "questions.jsonl", None) == "some/file.jsonl"
    with pytest.raises(ValueError, match="'stage:curate' is a stage of a run, and no"):
        stage_file("stage:curate", "questions.jsonl", None)
    with pytest.raises(
        ValueError, match=r"questions\.jsonl is missing; has this stage"
    ):
        stage_file("stage:curate", "questions.jsonl", tmp_path)
    (tmp_path / "curate").mkdir()
    (tmp_path / "curate" / "questions.jsonl").write_text("{}\n")
    actual = stage_file("stage:curate", "questions.jsonl", tmp_path)
    assert actual == str(tmp_path / "curate" / "questions.jsonl")


def test_a_plan_in_order_is_accepted():
    own = {
        "curate_rl": {"curate": {"method": "answerable", "first": "stage:curate"}},
        "sft_rewriter": {"trains": "rewriter"},
        "rl": {"data": {"train": "stage:curate_rl"}},
    }
    stages = ("curate", "sft", "curate_rl", "sft_rewriter", "rl")
    fields = {"sft__demonstrations": "stage:curate", "eval__at_start": False}
    fields |= {
        "models__rewriter__source": "stage:sft_rewriter",
        "rl__memorise_coef": 0.1,
    }
    fields |= {"models__reader__source": "stage:sft"}  # called only after that stage
    check_plan(planned(*stages, overrides=own, **fields))


@pytest.mark.parametrize(
    "stages, fields, message",
    [
        (
            ("curate", "sft"),
            {"sft__demonstrations": "stage:curate_a"},
            r"sft\.demonstrations = 'stage:curate_a', which stage sft reads: the run "
            "has no such stage; it has curate, sft",
        ),
        (
            ("sft", "curate"),
            {"sft__demonstrations": "stage:curate"},
            "stage curate has not ended by then",
        ),
        (
            ("curate", "rl"),
            {"data__train": "stage:curate"},
            "which stage curate reads: stage curate has not ended by then",
        ),
        (
            ("curate",),
            {"curate__first": "stage:curate"},
            r"curate\.first = 'stage:curate', which stage curate reads",
        ),
        (
            ("sft", "sft_b"),
            {"overrides": {"sft_b": {"sft": {"demonstrations": "stage:sft"}}}},
            "that leaves no such thing; name a stage of curate",
        ),
        (
            ("rl", "sft_rewriter"),
            {
                "models__rewriter__source": "stage:sft_rewriter",
                "rl__memorise_coef": 0.1,
            },
            "stage sft_rewriter has not ended by then",
        ),
        (
            ("curate", "rl"),
            {"models__rewriter__source": "stage:curate", "rl__memorise_coef": 0.1},
            "name a stage of sft or rl",
        ),
        (
            ("sft", "rl"),
            {"models__reader__source": "stage:sft"},
            "which the evaluation at the start reads: stage sft has not ended",
        ),
        (
            ("sft", "rl"),
            {"models__answerer__source": "stage:rl", "eval__at_start": False},
            "which evaluation reads: stage rl has not ended",
        ),
        (
            ("sft", "rl"),
            {"overrides": {"rl": {"model": {"source": "stage:sft"}}}},
            r"config\.model\.source = 'stage:sft' in stage rl",
        ),
    ],
)
def test_input_that_no_earlier_stage_writes_is_refused_before_anything_runs(
    stages, fields, message
):
    with pytest.raises(ValueError, match=message):
        check_plan(planned(*stages, **fields))


def test_fields_that_no_stage_reads_may_name_any_stage():
    fields = {
        "sft__demonstrations": "stage:curate",
        "models__rewriter__source": "stage:x",
    }
    check_plan(planned("rl", **fields))
