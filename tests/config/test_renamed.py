"""A field's former name is refused with the current one; runs that have it resume."""

import json
import pathlib

import pytest

from rsearch.config import recipes as configs
from rsearch.config.fields import RENAMED, rename_fields
from rsearch.config.spec import base_fields
from rsearch.runtime.workdir import Workdir, read_config

OLD_RUNS = pathlib.Path(__file__).parent / "old_runs"
BASE = configs.load("configs/base.py")


def test_every_renamed_field_or_section_exists():
    names = set(base_fields())
    sections = {name.rpartition(".")[0] for name in names}
    assert set(RENAMED.values()) <= names | sections
    assert not set(RENAMED) & (names | sections)


@pytest.mark.parametrize(
    "name, message",
    [
        ("rollout.slots", "config.rollout.max_concurrent"),
        ("judge.slots", "config.models.judge.max_concurrent"),
        ("writer.source", "config.models.writer.source"),
        ("rl.behavior", "config.rl.old_logprobs, 'sampled' is 'sampler'"),
        ("overrides.rl.rl.refill_rounds", "overrides.rl.rl.dynamic_sampling_rounds"),
    ],
)
def test_a_former_name_is_refused_with_the_current_one(name, message):
    with pytest.raises(ValueError, match=f"config.{name} is now .*{message}"):
        configs.apply_overrides(BASE, [f"{name}=1"])


@pytest.mark.parametrize("line", ["c.rollout.slots = 3", "c.judge.source = 'x'"])
def test_a_recipe_with_a_former_name_is_refused_with_the_current_one(tmp_path, line):
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from configs import base\n\n\ndef get_config():\n"
        f"    c = base.get_config()\n    {line}\n    return c\n"
    )
    with pytest.raises(ValueError, match=r"mine.py:6: .* is now config\.") as caught:
        configs.load(str(recipe))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "name, spec",
    [
        ("quickstart", "configs/quickstart.py"),
        ("r1_searcher_pp_tiny", "configs/r1_searcher_pp.py:tiny"),
    ],
)
def test_a_run_begun_with_former_names_is_resumed(tmp_path, capsys, name, spec):
    text = (OLD_RUNS / f"{name}.json").read_text()
    (tmp_path / "config.json").write_text(text)
    config = configs.load(spec)
    with Workdir(tmp_path, config, inputs={"tokenizer": "a"}) as work:
        assert work.is_resumed
        work.add_inputs({"data": "b"})
    assert "is now" not in capsys.readouterr().err
    assert read_config(tmp_path) == json.loads(configs.to_json(config))


def test_values_and_overrides_of_stages_are_also_renamed():
    old = {
        "rl": {"behavior": "scored", "lr": 1.0},
        "judge": {"slots": 3, "source": ""},
        "overrides": {"rl_x": {"rl": {"behavior": "sampled"}, "rollout": {"slots": 2}}},
        "reward": {"answer_em": {}},
        "stages": ["rl"],
    }
    assert rename_fields(old) == {
        "rl": {"old_logprobs": "recompute", "lr": 1.0},
        "models": {"judge": {"max_concurrent": 3, "source": ""}},
        "overrides": {
            "rl_x": {
                "rl": {"old_logprobs": "sampler"},
                "rollout": {"max_concurrent": 2},
            }
        },
        "reward": {"answer_em": {}},
        "stages": ["rl"],
    }
