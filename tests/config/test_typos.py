"""Every typo of one letter in a field's name is refused."""

import random

import pytest

from rsearch.config import recipes as configs

BASE = configs.load("configs/base.py")
FIELDS = sorted(configs.fields(BASE))
# So similar that a typo in one name may be as close to the other.
TWINS = ({"optim.b1", "optim.b2"}, {"writer", "rewriter"}, {"sets", "stages"})


def typos(name):
    """Return the names with one letter left out, one added, or two swapped."""
    actual = set()
    for i, letter in enumerate(name):
        if letter != ".":
            actual |= {name[:i] + name[i + 1 :], f"{name[:i]}x{name[i:]}"}
            actual.add(name[:i] + name[i + 1 : i + 2] + letter + name[i + 2 :])
    return sorted(actual - {"", *FIELDS})


def is_twin(name):
    return any({name, *name.split(".")} & twins for twins in TWINS)


@pytest.mark.fault(1, "any single edit")
def test_every_typo_of_one_letter_is_refused(monkeypatch):
    # The search for a name to suggest would take most of the time.
    monkeypatch.setattr("rsearch.config.fields.fields", lambda config: {})
    count = 0
    for name in FIELDS:
        for wrong in typos(name):
            count += 1
            with pytest.raises(ValueError) as caught:
                configs.check_known(BASE, wrong)
            assert str(caught.value).startswith(f"unknown field config.{wrong}")
    assert count > 10_000


@pytest.mark.fault(1, "nearest name")
def test_a_typo_is_refused_with_the_name_that_was_meant():
    draw = random.Random(0)
    for name in FIELDS:
        wrong = draw.choice(typos(name))
        with pytest.raises(ValueError, match=f"unknown field config.{wrong}") as caught:
            configs.check_known(BASE, wrong)
        meant = str(caught.value).partition("did you mean ")[2]
        assert is_twin(name) or f"config.{name}" in meant, (wrong, meant)


@pytest.mark.fault(1, "exit 2 in one line")
def test_a_typo_on_the_command_line_ends_with_code_2(capsys):
    def main(argv):
        configs.parse_command_line(argv, flags={})

    # A term of the reward may be the user's own: `check_terms` looks for its function.
    fields = [name for name in FIELDS if not name.startswith("reward.")]
    for name in random.Random(1).sample(fields, 12):
        wrong = typos(name)[0]
        words = ["--config=configs/base.py", f"--config.{wrong}=1"]
        assert configs.run_command(main, words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: unknown field config.{wrong}; did you mean ")
        assert is_twin(name) or f"config.{name}" in line


def none_of(name):
    node = BASE
    for key in name.split(".")[:-1]:
        node = node[key]
    return node[name.split(".")[-1]] is None, node.get_type(name.split(".")[-1])


@pytest.mark.fault(5, "set from the command line")
def test_a_field_that_is_none_is_set_from_the_command_line():
    given = {str: ("a word", "a word"), float: ("0.5", 0.5), int: ("3", 3)}
    asked = {n: none_of(n)[1] for n in FIELDS if none_of(n)[0]}
    assert {"protocol.system", "guards.max_kl"} <= asked.keys()
    for name, kind in asked.items():
        text, value = given[kind]
        words = ["--config=configs/base.py", f"--config.{name}={text}"]
        config, _ = configs.parse_command_line(words, flags={})
        assert configs.fields(config)[name] == value
        again = configs.apply_overrides(config, [f"{name}={text}"])
        assert configs.diff(config, again) == []
