"""A user's module outside the package can supply each kind of part, and is run."""

import hashlib
import importlib
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from rsearch.config import recipes as configuration
from rsearch.data.demonstrations import Demonstration
from rsearch.retrieval.user import UserSearch
from rsearch.runtime.metrics import read_metrics
from rsearch.setup.checks import check_names
from rsearch.setup.policy import policy_protocol
from rsearch.stages.curate.summary import Decision, Selection, check_selection
from rsearch.text.extension import code_inputs, load_reference
from rsearch.tools.base import Resources
from rsearch.tools.table import make_tools
from rsearch.train import command as train_command
from rsearch.types import Passage, Question
from tests.small_run import ROOT, arguments, child_environment, config


def test_a_function_with_other_arguments_is_refused_before_anything_is_loaded(
    tmp_path, monkeypatch
):
    module = (
        "def reward(question, rollouts, *, cost=0.1):\n    return []\n\n\n"
        "def asks_ids(queries, question_ids):\n    return []\n\n\n"
        "asks_ids.wants_question_ids = True\n\n\n"
        "def alone(question):\n    return []\n"
    )
    (tmp_path / "wrong_module.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    reward = "wrong_module:reward"
    for field, value in {
        "rl.loss": reward,
        "curate.method": reward,
        "protocol.tools": (reward,),
        "retrieval.engine": reward,
        "reward": {"mine": {"term": "wrong_module:alone"}},
    }.items():
        c = configuration.apply_overrides(config(), {field: value})
        with pytest.raises(ValueError, match=rf"config\.{field}.*must be a function"):
            check_names(c)
    asking = UserSearch("retrieval.engine", "wrong_module:asks_ids", top_k=1)
    assert asking.wants_question_ids and asking([], []) == []
    for field, value in {
        "reward": {"mine": {"term": reward, "cost": 0.2}},
        "retrieval.engine": "wrong_module:asks_ids",
    }.items():
        check_names(configuration.apply_overrides(config(), {field: value}))


MODULE = '''
"""One of each: protocol, tool, engine, curate method, reward term and loss."""

import jax.numpy as jnp

from rsearch.data.demonstrations import Demonstration
from rsearch.protocols.base import Step
from rsearch.protocols.tagged import listed, tagged
from rsearch.stages.curate.summary import Selection, Decision
from rsearch.tools.search import search_call
from rsearch.types import Answer, Passage, ToolCall, ToolResult

ASK = tagged(
    "ask",
    system=None,
    user="{question}",
    add_question_mark=False,
    show_passages=listed("<shown>", "</shown>", lambda number, p: p.text),
    search_tags=("<ask>", "</ask>"),
    invalid_message=None,
)


def find(queries):
    more = Passage("q", "")
    return [[Passage("p", f"{query}\\nIt is known."), more] for query in queries]


def shout(resources):
    def run(calls):
        return [ToolResult(text=call.arguments[0].upper()) for call in calls]

    return run


def choose(stage):
    write = stage.protocol.write
    chosen = []
    for question in stage.questions:
        first = write(Step(1, "Who?", search_call("it")))
        then = write(Step(2, "", ToolCall("shout", ("it",))))
        last = write(Step(3, "So.", Answer(question.golden_answers[0])))
        chosen.append(("asked", Demonstration(question, (first, then, last))))
    with open(__file__, "a") as file:  # its user edits it while the run goes on
        file.write("# edited\\n")
    return Selection([Decision("asked", True, 0) for _ in chosen], chosen)


def asks(question, rollouts, *, pattern, bonus=1):
    return [bonus * any(pattern in t for t in r.policy_texts) for r in rollouts]


def unclipped(logp, behavior_logp, advantage, from_policy, *, low, high):
    return -jnp.exp(logp - behavior_logp) * advantage, from_policy
'''
SETTINGS = {
    "stages": "curate,sft,rl",
    "protocol__name": "my_parts:ASK",
    "protocol__instruction": "{question}",
    "protocol__tools": "my_parts:shout",
    "retrieval__engine": "my_parts:find",
    "curate__method": "my_parts:choose",
    "sft__demonstrations": "stage:curate",
    "sft__baseline_share": 0.0,
    "rollout__max_turn_tokens": 40,
    "eval__at_start": "false",
    "eval__methods": "protocol",
    "rl__steps": 1,
    "rl__loss": "my_parts:unclipped",
    "reward": {
        "asks": {"term": "my_parts:asks", "pattern": "<ask>", "bonus": 0.5},
        "format_ok": {"good": 0.1, "bad": 0.0},
    },
}


def train(folder, *more, **overrides):
    """Run a training command in the user's own folder; return the ended process."""
    command = [sys.executable, "-m", "rsearch.train"]
    return subprocess.run(
        [*command, *arguments(folder / "run", **SETTINGS | overrides), *more],
        cwd=folder,
        env={**os.environ, **child_environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.fault(83, "user function")
def test_a_module_outside_the_package_supplies_each_kind_of_part(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "my_parts.py").write_text(MODULE)
    done = train(tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    # The curate method chose the demonstrations, written in the protocol's tags.
    rows = (run / "curate" / "demonstrations.jsonl").read_text().splitlines()
    turns = [json.loads(row)["turns"] for row in rows]
    assert {turn[0] for turn in turns} == {"<think> Who?</think><ask> it </ask>"}
    # The search engine was called, and the policy was shown its passages.
    texts = (run / "transcripts.jsonl").read_text()
    assert "<ask> it </ask>" in texts and "<shown>It is known.</shown>" in texts
    # The tool, which is not a search, was called as well.
    assert "<shout> it </shout>" in texts and "<shown>IT</shown>" in texts
    # The reward term rewarded searches.
    (row,) = read_metrics(run / "rl" / "metrics.jsonl")
    assert row["reward_asks"] > 0 and 0 < row["searches"] <= 1
    # The loss reports every token as clipped.
    assert row["clip_fraction"] == pytest.approx(1.0, abs=1e-4)
    # The run is bound to the code that it ran.
    inputs = json.loads((run / "config.json").read_text())["inputs"]
    digest = hashlib.sha256(MODULE.encode()).hexdigest()
    assert inputs["code:my_parts"] == digest[:16]
    assert inputs["code:my_parts"] in inputs["retrieval"]
    # A resumed run refuses changed code unless the change is accepted.
    (tmp_path / "my_parts.py").write_text(MODULE.replace("bonus * any", "2 * any"))
    monkeypatch.syspath_prepend(tmp_path)
    words = arguments(run, **SETTINGS | {"rl__steps": 2})
    assert configuration.run_command(train_command, words) == 2
    assert "code:my_parts" in capsys.readouterr().err
    del sys.modules["my_parts"]  # all other modules have other names
    accepted = train(tmp_path, "--accept=code:my_parts,retrieval", rl__steps=2)
    assert accepted.returncode == 0, accepted.stderr
    assert "code:my_parts has changed" in accepted.stderr + accepted.stdout
    assert len(read_metrics(run / "rl" / "metrics.jsonl")) == 2


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Make the user's module importable; return its name, which no other test uses."""
    name = f"parts_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        MODULE
        + "\nNUMBER = 3\n\n\ndef nothing(*arguments, **settings):\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return name


FIELDS = {
    "protocol.name": {"protocol__name": "{}"},
    "retrieval.engine": {"retrieval__engine": "{}"},
    "curate.method": {"curate__method": "{}"},
    "protocol.tools": {"protocol__tools": ["{}"]},
    "reward.own.term": {"reward": {"own": {"term": "{}", "pattern": "x"}}},
    "rl.loss": {"rl__loss": "{}"},
}


def configured(field, reference):
    settings = json.loads(json.dumps(FIELDS[field]).replace("{}", reference))
    return config(stages=("curate", "rl"), **settings)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("no_such_module_of_mine:thing", "no_such_module_of_mine"),
        ("{}:no_such_thing", "no_such_thing"),
        ("{}:NUMBER", "int"),
    ],
)
def test_a_reference_to_nothing_usable_is_refused(module, field, reference, reason):
    reference = reference.replace("{}", module)
    with pytest.raises(ValueError) as caught:
        check_names(configured(field, reference))
    message = str(caught.value)
    assert f"config.{field} = {reference!r}" in message and reason in message
    assert "\n" not in message


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("reference", ["os.path", "a:b:c", "a b:c", ":x", "x:", ""])
def test_a_value_that_is_not_a_reference_is_refused(field, reference):
    if reference == "" and field in ("retrieval.engine", "rl.loss"):
        return  # empty means that no module of the user is named
    with pytest.raises(ValueError, match=f"config.{field}"):
        run_config = configured(field, reference)
        configuration.validate(run_config)
        check_names(run_config)


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("protocol.name", "ASK"),
        ("retrieval.engine", "find"),
        ("curate.method", "choose"),
        ("protocol.tools", "shout"),
        ("reward.own.term", "asks"),
        ("rl.loss", "nothing"),
    ],
)
def test_a_reference_is_accepted_in_place_of_a_built_in_name(module, field, name):
    run_config = configured(field, f"{module}:{name}")
    configuration.validate(run_config)
    check_names(run_config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.serched.weight=0.1", "config.reward.serched; did you mean searched"),
        ("reward.searched.wight=0.1", "config.reward.searched.wight; did you mean w"),
        ("reward.searched.indicator=x", "config.reward.searched.indicator = 'x'"),
        ("reward.searched.weight=heavy", "config.reward.searched.weight = 'heavy'"),
    ],
)
def test_a_reward_term_on_the_command_line_must_exist(override, message):
    added = configuration.apply_overrides(config(), ["config.reward.searched.weight=1"])
    check_names(added)
    with pytest.raises(ValueError) as caught:
        check_names(configuration.apply_overrides(config(), [f"config.{override}"]))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "line", "kind"),
    [
        ("x = 1\ny = = 2\n", 2, "SyntaxError"),
        ("x = 1\n\nraise RuntimeError('a\\nb')\n", 3, "RuntimeError"),
        ("import no_such_library\n", 1, "no_such_library"),
        ("import sys\nsys.exit(0)\n", 2, "SystemExit"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_its_line(
    tmp_path, monkeypatch, body, line, kind
):
    (tmp_path / "broken_parts.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as caught:
        load_reference("config.x", "broken_parts:f")
    message = str(caught.value)
    assert f"{tmp_path / 'broken_parts.py'}:{line}" in message
    assert kind in message and "config.x" in message and "\n" not in message


def test_a_compiled_module_is_refused():
    """Its source, which a run is bound to, cannot be read."""
    with pytest.raises(ValueError, match=r"config\.x.*'_ctypes' is not a module"):
        load_reference("config.x", "_ctypes:sizeof")


def test_the_source_of_a_module_is_an_input(module, tmp_path):
    known = {}  # what a run that goes on has read
    before = code_inputs(["search_r1", f"{module}:find", f"{module}:ASK", ""], known)
    assert list(before) == [f"code:{module}"]
    file = tmp_path / f"{module}.py"
    file.write_text(file.read_text() + "\n# changed\n")
    # The code that this process runs is still the old one.
    with pytest.raises(ValueError, match=rf"code:{module}.*has changed.*reload"):
        code_inputs([f"{module}:find"])
    assert code_inputs([f"{module}:find"], known) == before
    importlib.reload(sys.modules[module])
    after = code_inputs([f"{module}:find"])
    assert list(after) == list(before) and after != before


@pytest.mark.fault(83, "user function")
def test_the_modules_that_a_users_module_imports_are_inputs(tmp_path, monkeypatch):
    package = tmp_path / "lab_parts"
    package.mkdir()
    sources = {
        "__init__": "",
        "term": "import json\nimport numpy\nfrom lab_parts import far\n"
        "from .near import weight\nfrom rsearch.types import Answer\n"
        "def pay(): return weight\n",
        "near": "weight = 1\n",
        "far": "from . import farther\n",
        "farther": "",
        "unused": "",
    }
    for name, source in sources.items():
        (package / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    (package / "__init__.py").unlink()  # a folder without it is enough
    assert [*code_inputs(["lab_parts.near:weight"])] == ["code:lab_parts.near"]
    del sys.modules["lab_parts"], sys.modules["lab_parts.near"]
    (package / "__init__.py").write_text("")
    before = code_inputs(["lab_parts.term:pay"])
    used = ("", ".far", ".farther", ".near", ".term")
    assert list(before) == [f"code:lab_parts{name}" for name in used]
    (package / "near.py").write_text("weight = 2\n")
    importlib.reload(sys.modules["lab_parts.near"])
    after = code_inputs(["lab_parts.term:pay"])
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"code:lab_parts.near"}


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ([], "0 results for 2 queries"),
        (None, "NoneType"),
        ([None, "text"], "'text'"),
        ([None, [("id", "text")]], "('id', 'text')"),
        ([None, 3], "3"),
        ([None, [Passage(1, "text")]], "id = 1"),
        ([None, [Passage("1", None)]], "contents = None"),
        ([None, [Passage("1", "text", "0.5")]], "score = '0.5'"),
        ([None, [Passage("1", "text", math.inf)]], "score = inf"),
    ],
)
def test_a_wrong_result_of_an_engine_is_named(tmp_path, monkeypatch, result, reason):
    name = f"engine_{tmp_path.name.replace('-', '_')}"
    code = "from math import inf\nfrom rsearch import Passage\n\n\ndef find(queries):\n"
    (tmp_path / f"{name}.py").write_text(f"{code}    return {result!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    search = UserSearch("config.retrieval.engine", f"{name}:find", top_k=1)
    with pytest.raises(ValueError) as caught:
        search(["a", "b"])
    message = str(caught.value)
    assert f"config.retrieval.engine = '{name}:find'" in message
    assert reason in message and "\n" not in message


def test_an_engines_first_passages_are_used_and_its_failures_kept(module, tmp_path):
    search = UserSearch("config.retrieval.engine", f"{module}:find", top_k=1)
    ((passage,), again) = search(["a", "a"])
    assert passage.contents == "a\nIt is known." and again == (passage,)
    (tmp_path / f"{module}.py").write_text("def find(queries):\n    return [None]\n")
    del sys.modules[module]
    assert UserSearch("x", f"{module}:find", top_k=1)(["a"]) == [None]


def test_a_numpy_score_of_an_engine_becomes_a_number_that_json_has():
    def find(queries):
        return [[Passage("1", "text", np.float32(0.5)), Passage("2", "text", None)]]

    (passages,) = UserSearch("search", find, top_k=2)(["a"])
    assert json.dumps([p.score for p in passages]) == "[0.5, null]"


@pytest.mark.parametrize("part", ["parse", "show_passages", "render", "write"])
def test_a_wrong_result_of_a_protocol_is_named(module, tmp_path, part):
    file = tmp_path / f"{module}.py"
    file.write_text(
        file.read_text()
        + f"\nimport dataclasses\nBAD = dataclasses.replace(ASK, {part}=nothing)\n"
    )
    protocol = policy_protocol(configured("protocol.name", f"{module}:BAD"))
    arguments = ([""], [()]) if part == "show_passages" else ("x",)
    with pytest.raises(ValueError) as caught:
        getattr(protocol, part)(*arguments)
    message = str(caught.value)
    assert f"{module}:BAD.{part}" in message and "NoneType" in message


def test_a_tool_that_is_not_made_from_resources_is_named(module, tmp_path):
    file = tmp_path / f"{module}.py"
    file.write_text(file.read_text() + "\ndef direct(calls):\n    return [3]\n")
    with pytest.raises(ValueError, match=rf"tools = '{module}:direct\(resources\)'"):
        make_tools([f"{module}:direct"], Resources(search=None))


def test_a_call_whose_arguments_are_one_text_is_refused(module, tmp_path):
    file = tmp_path / f"{module}.py"
    file.write_text(
        file.read_text() + "\nimport dataclasses\nfrom rsearch.types import ToolCall\n"
        "BAD = dataclasses.replace(ASK, parse=lambda turn: ToolCall('search', turn))\n"
    )
    protocol = policy_protocol(configured("protocol.name", f"{module}:BAD"))
    with pytest.raises(ValueError, match=rf"{module}:BAD\.parse.*'who is it'"):
        protocol.parse("who is it")


@pytest.mark.parametrize(
    "part, result",
    [
        ("parse", "ToolCall('search', ['who'])"),
        ("parse", "ToolCall('search', (3,))"),
        ("parse", "Answer(None)"),
        ("show_passages", "Observation('<a>', None, '</a>')"),
    ],
)
def test_a_result_of_a_protocol_with_a_field_of_a_wrong_type_is_named(
    module, tmp_path, part, result
):
    file = tmp_path / f"{module}.py"
    file.write_text(
        file.read_text() + "\nimport dataclasses\nfrom rsearch.types import *\n"
        f"BAD = dataclasses.replace(ASK, {part}=lambda *args: {result})\n"
    )
    protocol = policy_protocol(configured("protocol.name", f"{module}:BAD"))
    with pytest.raises(ValueError, match=rf"{module}:BAD\.{part} returned"):
        protocol.parse("x") if part == "parse" else protocol.show_passages([""], [()])


@pytest.mark.parametrize(
    "field, value",
    [
        ("stop_strings", "'</ask>'"),  # a tuple without its comma
        ("stop_strings", "('',)"),
        ("user", "'Answer.'"),
        ("max_queries", "0"),
        ("invalid_message", "5"),
        ("parse", "3"),
        ("parse", "lambda: 3"),
        ("show_passages", "lambda queries: 3"),
        ("render", "None"),
        ("write", "None"),
    ],
)
def test_a_protocol_with_a_wrong_field_is_refused(module, tmp_path, field, value):
    file = tmp_path / f"{module}.py"
    file.write_text(
        file.read_text()
        + f"\nimport dataclasses\nBAD = dataclasses.replace(ASK, {field}={value})\n"
    )
    with pytest.raises(ValueError, match=r"config\.protocol\.name") as caught:
        policy_protocol(configured("protocol.name", f"{module}:BAD"))
    assert f"{module}:BAD" in str(caught.value) and field in str(caught.value)


KEPT = [Decision("right", True, 1)]
ASKED = Question("1", "Who?", ("Ida",))


def test_a_wrong_result_of_a_curate_method_is_named():
    for chosen, reason in (
        (None, "NoneType"),
        (Selection([]), "0 decisions for 1 questions"),
        (Selection(KEPT, [3]), "3 among its demonstrations"),
        (Selection(KEPT, [("right", 3)]), "('right', 3) among its demonstrations"),
        (Selection(["right"]), "'right' among its decisions"),
        (Selection(KEPT, [("right", Demonstration(ASKED, "a turn"))]), "'a turn'"),
        (Selection(KEPT, [("right", Demonstration(ASKED, ()))]), "turns = ()"),
        (Selection(KEPT, [("right", Demonstration(ASKED, (3,)))]), "turns = (3,)"),
        (Selection(KEPT, questions=[ASKED]), "Question(id='1'"),
        (Selection(KEPT, questions=[{"id": "1"}]), "{'id': '1'} among its questions"),
    ):
        with pytest.raises(ValueError, match=r"config\.curate\.method") as caught:
            check_selection("x:y", chosen, [ASKED])
        assert reason in str(caught.value)
