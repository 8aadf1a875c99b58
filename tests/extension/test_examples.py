"""The examples of docs/extend.md: each is short, and does what the page says."""

import importlib
import json
import os
import re
import shlex
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.config import recipes
from rsearch.learn.objectives import checked_token_loss
from rsearch.retrieval.user import UserSearch
from rsearch.setup.checks import check_names
from rsearch.stages.curate.summary import check_selection
from rsearch.tools.base import Resources
from rsearch.tools.table import make_tools
from rsearch.types import SEARCH, Answer, Malformed, Passage, ToolCall
from tests.document_commands import run_bash
from tests.methods.scripted import ScriptedModel, Searched, answer_one, kit
from tests.rewards.play import PARIS, play
from tests.small_run import ROOT

EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
COMMANDS = [
    words.replace("\\\n", " ")
    for words in re.findall(r"^python -m (.*?[^\\])$", PAGE, re.DOTALL | re.MULTILINE)
]


CHECKED = [command for command in COMMANDS if "--config=" in command]
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
FEW = "--config.sft.steps=1 --config.rl.steps=1 --config.eval.max_questions=2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a directory to use as runs/, with a quickstart of a few steps."""
    folder = tmp_path_factory.mktemp("runs")
    run_block(
        "python -m rsearch.train --config=configs/quickstart.py \\\n"
        "    --workdir=runs/quickstart\n",
        folder,
    )
    return folder


def run_block(block, folder):
    """Run the commands of a page with few steps, using `folder` as runs/."""
    script = re.sub(r"(-m rsearch\.(train|evaluate)) ", rf"\1 {FEW} ", block)
    script = script.replace("runs/", f"{folder}/").replace("world.jsonl", f"{folder}/w")
    run_bash(script, ROOT, os.environ)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=lambda text: text.split()[-1])
def test_the_commands_of_the_page_run(block, runs):
    run_block(block, runs)


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    yield
    for path in EXAMPLES:  # other tests may have modules of these names
        sys.modules.pop(path.stem, None)


def example(name):
    return importlib.import_module(name)


def test_every_example_is_short_and_used_by_a_command_of_the_page():
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 40, path
        assert f"(examples/{path.name})" in PAGE
        assert any(f"{path.stem}:" in command for command in COMMANDS), path


@pytest.mark.parametrize("command", CHECKED, ids=lambda text: text.split("=")[-1])
def test_the_functions_that_a_command_names_are_accepted(command):
    module, *words = shlex.split(command)
    flags = {"workdir": ("", "the run's"), "methods": ("", "the evaluation's")}
    config, values = recipes.parse_command_line(words, flags=flags)
    if values["methods"]:
        overrides = [f"eval.methods={values['methods']}"]
        config = recipes.apply_overrides(config, overrides)
    recipes.validate(config)
    check_names(config)
    assert module in ("rsearch.train", "rsearch.evaluate")


def test_the_reward_subtracts_the_cost_of_searches():
    ask = example("ask_tags").ASK
    passage = Passage("p", "France\nParis is its capital.")
    turns = ["<ask> capital of France </ask>", "<answer> Paris </answer>"]
    searched = play(ask, turns, [passage])
    wrong = play(ask, ["<answer> Rome </answer>"])
    reward = example("search_cost").f1_minus_searches
    assert reward(PARIS, [searched, wrong], cost=0.1) == [pytest.approx(0.9), 0.0]
    shown = "".join(segment.text for segment in searched.segments)
    assert "<found>[1] France: Paris is its capital.</found>" in shown


@pytest.mark.parametrize(
    ("turn", "action"),
    [
        ("so <ask> a b </ask>", ToolCall(SEARCH, ("a b",))),
        ("<answer> c </answer>", Answer("c")),
        ("<search> a </search>", Malformed),
    ],
)
def test_the_protocol_reads_its_own_tags(turn, action):
    actual = example("ask_tags").ASK.parse(turn)
    assert actual == action or type(actual) is action


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("1912 + 7", "1919"),
        ("2 * (3 - 1) / 4", "1.0"),
        ("2 ** 9", None),
        ("1 / 0", None),
        ("__import__('os')", None),
        ("", None),
    ],
)
def test_the_calculator_computes_and_runs_no_code(text, result):
    tools = make_tools(["calculator:calculator"], Resources(search=None))
    (answer,) = tools["calculator"]([ToolCall("calculator", (text,))])
    assert answer.text == (result or "Write a sum such as 1912 + 7.")
    assert answer.error is None


def test_the_retriever_finds_titles(tmp_path, monkeypatch):
    corpus = {"1": '"Goldberg"\nLies in Pellia.', "2": "Ida Busch\nBorn in Goldberg."}
    with open(tmp_path / "corpus.jsonl", "w") as file:
        for id, contents in corpus.items():
            file.write(json.dumps({"id": id, "contents": contents}) + "\n")
    monkeypatch.setenv("CORPUS", str(tmp_path / "corpus.jsonl"))
    search = UserSearch("config.retrieval.engine", "title_search:find", top_k=1)
    hits, none = search(["is Ida Busch of goldberg?", "nobody"])
    assert [passage.id for passage in hits] == ["2"] and none == ()


def test_the_method_searches_with_its_first_answer():
    search = Searched()
    model = ScriptedModel(lambda request: f"reply {len(model.requests)}")
    method = example("search_twice").search_twice
    rollout = answer_one(method, model, search=search)
    first, second = search.queries
    assert second.startswith("reply ") and second.endswith(first)
    assert rollout.answer.startswith("reply ") and kit().top_k


def test_the_loss_has_the_gradient_of_its_clipped_weight():
    cispo = example("cispo").cispo
    logp = jnp.array([[0.0, 3.0, jnp.nan]])
    before, mask = jnp.zeros((1, 3)), jnp.array([[True, True, False]])
    advantage = jnp.array([[2.0, 1.0, jnp.nan]])

    def total(logp):
        loss, clipped = cispo(logp, before, advantage, mask, low=0.2, high=0.5)
        return jnp.sum(loss), clipped

    grad, clipped = jax.grad(total, has_aux=True)(logp)
    np.testing.assert_allclose(grad, [[-2.0, -1.5, 0.0]])
    np.testing.assert_array_equal(clipped, [[False, True, False]])


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (jnp.zeros((1, 2)), "Array"),
        ((jnp.zeros(()), jnp.zeros((1, 2))), r"\[\(\), \(1, 2\)\]"),
        (None, "NoneType"),
    ],
)
def test_a_wrong_result_of_a_loss_is_named(result, reason):
    loss = checked_token_loss("config.rl.loss = 'x:y'", lambda *_, **__: result)
    with pytest.raises(ValueError, match=f"rl.loss = 'x:y'.*{reason}") as caught:
        jax.jit(lambda logp: loss(logp, low=0.2, high=0.2))(jnp.zeros((1, 2)))
    assert recipes.is_user_error(caught.value)  # although JAX has traced the loss


def test_the_data_are_demonstrations_of_golden_answers():
    class Stage:
        protocol, questions = example("ask_tags").ASK, (PARIS,)

    chosen = example("known_answers").known_answers(Stage)
    check_selection("known_answers:known_answers", chosen, Stage.questions)
    ((kind, demonstration),) = chosen.demonstrations
    assert kind == "known" and "<answer> Paris </answer>" in demonstration.turns[0]
