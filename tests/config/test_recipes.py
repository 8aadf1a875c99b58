"""What a user writes into a configuration is either valid or refused in one line."""

import json
import re

import pytest
from ml_collections import ConfigDict

from rsearch.config import recipes as configs

BASE = configs.load("configs/base.py")
FIELDS = sorted(configs.fields(BASE))
RECIPES = [
    path
    for path in sorted((configs.ROOT / "configs").glob("[!_]*.py"))
    if "\ndef get_config(" in path.read_text()  # the others are parts of recipes
]


def section_of(name):
    node = BASE
    for key in name.split(".")[:-1]:
        node = node[key]
    return node, name.split(".")[-1]


def kind_of(name):
    node, leaf = section_of(name)
    return node.get_type(leaf)


CLOSED = [
    name for name in FIELDS if not name.startswith(("reward.", "overrides", "sets"))
]
WRONG = {
    int: ("x", "1.5", 1.5, True, None, [1], ""),
    float: ("x", True, None, [1.0], ""),
    bool: ("maybe", 1, None, ""),
    str: (3, None, ["a"], True),
    tuple: (3, None, [1], "(1,"),
}


# Loading


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_is_valid_and_locked(path):
    config = configs.load(f"configs/{path.name}")
    configs.validate(config)
    assert config.is_locked
    assert configs.fields(config).keys() >= {n for n in FIELDS if n in CLOSED}


def test_a_dotted_name_means_the_same_file():
    assert configs.diff(configs.load("configs.base"), BASE) == []


def recipe(tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text("from configs import base\n\n\n" + body)
    return path


def test_the_variant_is_passed_to_get_config(tmp_path):
    body = "def get_config(v='a'):\n    c = base.get_config()\n    c.name = v\n"
    path = recipe(tmp_path, body + "    return c\n")
    assert configs.load(str(path)).name == "a"
    assert configs.load(f"{path}:parity").name == "parity"


@pytest.mark.fault(6, "syntax error", "error while it runs")
@pytest.mark.parametrize(
    "body, message",
    [
        ("def get_config(:\n", r"mine\.py:4:\d+: invalid syntax"),
        ("x = 1\0\n", r"mine\.py:1:1: .*null bytes"),
        ("def other(): pass\n", r"mine\.py: defines no function get_config"),
        ("def get_config(): return {}\n", r"returned dict, not a ConfigDict"),
        ("def get_config():\n    return 1 / 0\n", r"mine\.py:5: ZeroDivisionError"),
        (
            "def get_config():\n    c = base.get_config()\n    c.sede = 1\n",
            r"mine\.py:6: .*sede",
        ),
        (
            "def get_config():\n    c = base.get_config()\n    c.seed = 'x'\n",
            r"mine\.py:6: .*seed",
        ),
        ("import nonesuch\n", r"mine\.py:4: ModuleNotFoundError: .*nonesuch"),
    ],
)
def test_a_broken_recipe_is_named_by_file_and_line(tmp_path, body, message):
    with pytest.raises(ValueError, match=message) as caught:
        configs.load(str(recipe(tmp_path, body)))
    assert "\n" not in str(caught.value)


def test_a_variant_is_refused_if_the_recipe_has_none():
    with pytest.raises(ValueError, match="takes no variant, got 'parity'"):
        configs.load("configs/base.py:parity")


@pytest.mark.fault(6, "missing")
def test_a_misspelt_recipe_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"did you mean configs/base\.py\?"):
        configs.load("configs/bace.py")


# Overrides


@pytest.mark.fault(1, "nearest name")
@pytest.mark.parametrize(
    "wrong, right",
    [
        ("rollout.group_sise", "rollout.group_size"),
        ("rollout.groupsize", "rollout.group_size"),
        ("rolout.temperature", "rollout.temperature"),
        ("group_size", "rollout.group_size"),
        ("sede", "seed"),
        ("rl.kl_coeff", "rl.kl_coef"),
    ],
)
def test_a_misspelt_field_is_refused_with_the_nearest_name(wrong, right):
    for overrides in ({wrong: 1}, [f"{wrong}=1"], [f"config.{wrong}=1"]):
        with pytest.raises(ValueError, match=f"did you mean config.{right}\\?"):
            configs.apply_overrides(BASE, overrides)


@pytest.mark.fault(1, "nearest name")
def test_a_field_in_the_wrong_section_is_refused_with_its_sections():
    with pytest.raises(ValueError) as caught:
        configs.apply_overrides(BASE, {"optim.lr": 3e-6})
    message = "did you mean config.critic.lr or config.rl.lr or config.sft.lr?"
    assert message in str(caught.value)
    with pytest.raises(ValueError, match=r"did you mean config\.rollout\.group_size\?"):
        configs.apply_overrides(BASE, {"rl.group_size": 4})


def test_every_field_with_one_letter_missing_is_refused_with_its_name():
    for name in CLOSED:
        stem, _, leaf = name.rpartition(".")
        wrong = f"{stem}.{leaf[:-1]}" if stem else leaf[:-1]
        if len(leaf) > 3 and wrong not in FIELDS:
            with pytest.raises(ValueError, match=f"did you mean config.{name}\\?"):
                configs.apply_overrides(BASE, {wrong: 1})


@pytest.mark.parametrize("name", CLOSED)
def test_field_refuses_every_wrong_type(name):
    node, leaf = section_of(name)
    for value in WRONG[kind_of(name)]:
        if value is None and node[leaf] is None:
            continue
        if value == "" and kind_of(name) is str:
            continue
        field = rf"config\.{re.escape(name)}(\[0\])? = "  # a wrong item is named
        with pytest.raises(ValueError, match=field):
            configs.apply_overrides(BASE, {name: value})


@pytest.mark.parametrize("name", CLOSED)
def test_field_takes_its_own_value_from_python_and_as_text(name):
    value = configs.fields(BASE)[name]
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    for overrides in ({name: value}, [f"config.{name}={text}"]):
        assert configs.diff(BASE, configs.apply_overrides(BASE, overrides)) == []


@pytest.mark.parametrize(
    "text, value",
    [
        ("rl.lr=1", 1.0),
        ("rl.lr=3e-6", 3e-6),
        ("seed= 7 ", 7),
        ("model.remat=TRUE", True),
        ("model.remat=false", False),
        ("stages=sft,rl", ("sft", "rl")),
        ("stages=('sft', 'rl')", ("sft", "rl")),
        ("stages=rl", ("rl",)),
        ("protocol.system=Think a=b.", "Think a=b."),
        ("model.source=123", "123"),
    ],
)
def test_text_is_read_as_the_fields_type(text, value):
    changed = configs.apply_overrides(BASE, [text])
    actual = configs.fields(changed)[text.partition("=")[0]]
    assert actual == value and type(actual) is type(value)


@pytest.mark.parametrize("value", [("sft", 3), "('sft', 3)"])
def test_a_wrong_item_of_a_tuple_is_named(value):
    with pytest.raises(ValueError, match=r"^config\.stages\[1\] = 3: expected str$"):
        configs.apply_overrides(BASE, {"stages": value})


def test_overrides_leave_the_original_and_may_be_nested():
    before = configs.fingerprint(BASE)
    nested = configs.apply_overrides(BASE, {"rl": {"lr": 0.5}, "optim.b1": 0.5})
    assert (nested.rl.lr, nested.optim.b1) == (0.5, 0.5)
    assert configs.fingerprint(BASE) == before
    assert nested.is_locked


def test_reward_is_replaced_as_a_whole():
    wanted = {"answer_f1": {"weight": 2.0}, "format_ok": {"good": 0.5}}
    for overrides in ({"reward": wanted}, [f"reward={wanted}"]):
        changed = configs.apply_overrides(BASE, overrides)
        assert changed.reward.to_dict() == wanted
    for bad in ("{", "3", "__import__('os')", "{'a': 1}"):
        with pytest.raises(ValueError, match=r"config\.reward"):
            configs.apply_overrides(BASE, [f"reward={bad}"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", 0.1),
        ("3", 3),
        ("true", True),
        ("False", False),
        ("None", None),
        ("(1, 'a')", (1, "a")),
        ("acd", "acd"),
        ("my_rewards:mentions", "my_rewards:mentions"),
        ("[0-9]", "[0-9]"),
        ("'0.5'", "0.5"),
    ],
)
def test_an_override_adds_a_reward_term_that_the_recipe_does_not_have(text, value):
    changed = configs.apply_overrides(BASE, [f"config.reward.searched.value={text}"])
    (setting,) = changed.reward.searched.to_dict().items()
    assert setting == ("value", value) and type(setting[1]) is type(value)
    assert changed.reward.answer_em == BASE.reward.answer_em
    assert changed.is_locked and "searched" not in BASE.reward
    same = configs.apply_overrides(BASE, {"reward.searched.value": value})
    assert same == changed
    again = configs.apply_overrides(changed, ["reward.searched.value=text"])
    assert again.reward.searched.value == "text"


@pytest.mark.parametrize("name", ["reward.x", "reward.x.", "reward..x", "reward.x.y.z"])
def test_only_a_term_and_its_setting_can_be_added(name):
    with pytest.raises(ValueError, match=f"unknown field config.{name}"):
        configs.apply_overrides(BASE, [f"{name}=1"])


def test_a_field_can_be_overridden_in_one_stage_of_a_recipe_without_overrides():
    words = [
        "stages=rl_a,rl_b",
        "overrides.rl_b.rl.lr=0.25",
        "reward.answer_em.weight=2",
    ]
    words += ["overrides.rl_b.reward.answer_f1.weight=3", "rl.steps=5"]
    words += ["overrides.rl_b.guards.max_empty=0.5"]
    config = configs.apply_overrides(BASE, words)
    assert config.is_locked and config.overrides.to_dict() == {
        "rl_b": {
            "rl": {"lr": 0.25},
            "guards": {"max_empty": 0.5},
            # A stage's reward replaces the run's, so the run's terms are repeated.
            "reward": {"answer_em": {"weight": 2}, "answer_f1": {"weight": 3}},
        }
    }
    again = configs.apply_overrides(config, {"overrides.rl_b.rl.steps": 7})
    assert again.overrides.rl_b.rl.to_dict() == {"lr": 0.25, "steps": 7}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("overrides.rl.rl.lr=x", "config.overrides.rl: config.rl.lr = 'x'"),
        ("overrides.rl.rl.lrr=1", "config.overrides.rl: unknown field config.rl.lrr"),
        ("overrides.rl_a.rl.lr=1", "config.overrides.rl_a.rl.lr is for no stage"),
        ("overrides={'rl': {'rl.lr': 1}}", "'rl.lr' has a dot"),
        ("reward={'a.b': {}}", "'a.b' has a dot"),
    ],
)
def test_a_wrong_override_in_a_stage_is_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        configs.apply_overrides(BASE, [text])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("none", [None, "None"])
def test_a_field_that_a_recipe_sets_can_be_set_to_its_default_none(none):
    recipe = configs.apply_overrides(BASE, {"guards.max_empty": 0.5})
    recipe = configs.apply_overrides(recipe, {"protocol.system": "You search."})
    changes = {"guards.max_empty": none, "protocol.system": none}
    assert configs.apply_overrides(recipe, changes) == BASE


@pytest.mark.fault(7, "conflicting overrides")
@pytest.mark.parametrize(
    "overrides",
    [
        ["reward.searched.value=1", "reward.searched.value=2"],
        ["seed=1", "seed=2"],
        ["config.rl.lr=1", "rl.lr=2"],
        {"rl": {"lr": 1.0}, "rl.lr": 2.0},
    ],
)
def test_conflicting_overrides_are_refused(overrides):
    with pytest.raises(ValueError, match=r"conflicting overrides: config\.\w+.*2"):
        configs.apply_overrides(BASE, overrides)


def test_equal_overrides_do_not_conflict():
    assert configs.apply_overrides(BASE, ["seed=3", "seed=3"]).seed == 3


def test_section_cannot_be_set_to_a_value():
    with pytest.raises(ValueError, match=r"config\.mesh is a section; set one of"):
        configs.apply_overrides(BASE, ["mesh=8"])


# Comparing


def test_the_fingerprint_differs_if_any_field_differs():
    prints = {configs.fingerprint(BASE)}
    for name in CLOSED:
        value, kind = configs.fields(BASE)[name], kind_of(name)
        new = {
            bool: lambda v: not v,
            str: lambda v: f"{v}x",
            tuple: lambda v: (*v, "x"),
        }.get(kind, lambda v: (v or 0) + 1)(value)
        changed = configs.apply_overrides(BASE, {name: new})
        prints.add(configs.fingerprint(changed))
        ((actual, _, _),) = configs.diff(BASE, changed)
        assert actual == name
    assert len(prints) == len(CLOSED) + 1


def test_diff_sees_absent_fields_and_types():
    old, new = ConfigDict({"a": 1, "b": {"c": 1}}), {"b": {"c": 1.0, "d": []}}
    assert configs.diff(old, new) == [
        ("a", 1, configs.ABSENT),
        ("b.c", 1, 1.0),
        ("b.d", configs.ABSENT, []),
    ]


def test_a_json_round_trip_changes_nothing():
    assert configs.diff(json.loads(configs.to_json(BASE)), BASE) == []


def test_printed_configuration_names_every_field(capsys):
    configs.print_config(BASE)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" = ")[0] for line in lines] == [
        f"config.{name}" for name in FIELDS
    ]
    assert f"config.seed = {BASE.seed!r}" in lines
