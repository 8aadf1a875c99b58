"""rsearch.evaluate: its counts, the files it writes, and how it fails."""

import ast
import json
import pathlib
import re
import shutil
import sys
from unittest import mock

import pytest

from rsearch import evaluate as evaluate_command
from rsearch import export, train
from rsearch.config.recipes import run_command
from rsearch.evaluation import evaluator as evaluate
from rsearch.evaluation import results
from rsearch.evaluation.scoring import COSTS
from rsearch.methods.table import NEEDS_EXTRA_INPUTS
from rsearch.models.hf import checkpoint as huggingface
from rsearch.rollout.health import HEALTH, NEEDLESS, RECALL_BY_SEARCH
from rsearch.runtime import checkpoint, storage
from rsearch.runtime.jsonl import read_jsonl
from rsearch.runtime.workdir import Workdir
from rsearch.setup.load import load_setup
from rsearch.setup.stages import evaluation_parts
from rsearch.setup.weights import initial_params, trained_params
from tests.evaluation.test_scoring import GROUPS, OUTCOMES, SCORES, group
from tests.llm.test_endpoint import reply, serving
from tests.small_run import (
    arguments,
    config,
    finished,
    one_device,
    quick_compilation,
    run_python,
    without_times,
)

__all__ = ["one_device", "quick_compilation"]
pytestmark = pytest.mark.usefixtures("one_device")
FIELDS = {
    *("stage", "step", "method", "dataset", "questions", "normalize", "n"),
    *("skipped", "too_long", "start", "setting", "made_by"),
    *("seconds", "compile_seconds"),
    *("searches", "queries", "searches_right", "searches_wrong", "unsearched"),
    *("policy_tokens", "tokens", "by_kind", "by_known", "asks", "notes", *COSTS),
    *HEALTH,
    RECALL_BY_SEARCH,
    *SCORES,
    *(f"{name}_95" for name in SCORES),
    *OUTCOMES,
}


def row_of(stage="rl", method="rag", dataset="d", **more):
    return {"stage": stage, "step": 1, "method": method, "dataset": dataset, **more}


def test_transcripts_hold_the_whole_conversation():
    first, second = results.transcripts(GROUPS[:2], row_of())
    assert first == {
        "stage": "rl",
        "method": "rag",
        "dataset": "d",
        "id": "q0",
        "question": "Question 0?",
        "golden_answers": ["paris", "Lutetia"],
        "prediction": "Paris",
        "outcome": "answered",
        "queries": [],
        "passages": [],
        "suspicious": [],
        "segments": [
            {"source": "prompt", "text": "What"},
            {"source": "policy", "text": "12345"},
        ],
    }
    assert second["queries"] == ["query 1", "query 1"]
    assert len(second["passages"]) == 2
    assert [s["source"] for s in second["segments"]] == [
        *("prompt", "policy"),
        *("search", "search"),
    ]


def test_a_row_of_the_same_kind_is_replaced_and_so_are_its_transcripts(tmp_path):
    kinds = [
        row_of(),
        row_of(stage="sft"),
        row_of(method="direct"),
        row_of(dataset="e"),
    ]
    for number, row in enumerate([*kinds, row_of()]):
        told = results.transcripts(GROUPS[:2], row)
        results.record_results(tmp_path, {**row, "number": number}, told)
    rows = results.read_results(tmp_path)
    assert [r["number"] for r in rows] == [1, 2, 3, 4]
    told = read_jsonl(tmp_path / "transcripts.jsonl")
    assert len(told) == 2 * 4
    keys = [tuple(t[n] for n in ("stage", "method", "dataset", "id")) for t in told]
    assert len(set(keys)) == 8


@pytest.mark.parametrize("order", [("protocol", "direct"), ("direct", "protocol")])
def test_a_search_is_needless_if_direct_is_right_on_the_same_question(tmp_path, order):
    """Direct is right on the first two questions; only the second was searched for."""
    asked = {
        "protocol": GROUPS,  # searched for all but the first
        "direct": [group(i, a, ("Paris",)) for i, a in enumerate(["paris", "Paris"])],
    }
    same = {"normalize": "squad", "questions": "x"}
    for method in order:
        row = row_of(method=method, **same)
        results.record_results(tmp_path, row, results.transcripts(asked[method], row))
    rows = {r["method"]: r for r in results.read_results(tmp_path)}
    assert rows["protocol"][NEEDLESS] == 1 / 2 and NEEDLESS not in rows["direct"]
    for change in ({"questions": "y"}, {"step": 2}, {"normalize": "flashrag"}):
        row = row_of(method="direct", **same) | change
        told = results.transcripts(asked["direct"], row)
        rows = results.record_results(tmp_path, row, told)
        assert rows[0][NEEDLESS] is None, change


def test_a_policys_text_cannot_break_the_files(tmp_path):
    asked = [group(0, 'a"\n\x00\u2028\ufffd', ("{}",))]
    for row in (row_of(), row_of(method="direct")):
        results.record_results(tmp_path, row, results.transcripts(asked, row))
    told = read_jsonl(tmp_path / "transcripts.jsonl")
    assert [t["prediction"] for t in told] == ['a"\n\x00\u2028\ufffd'] * 2


def test_a_file_of_results_that_is_not_json_is_refused(tmp_path):
    assert results.read_results(tmp_path) == []
    (tmp_path / "results.json").write_text("[{")
    with pytest.raises(ValueError, match=r"results\.json is not JSON"):
        results.read_results(tmp_path)


def test_every_row_of_a_run_has_all_fields_and_every_question_a_transcript():
    rows = results.read_results(finished())
    assert all(row.keys() == FIELDS for row in rows)
    assert all(row["n"] == 6 == sum(row[o] for o in OUTCOMES) for row in rows)
    told = read_jsonl(finished() / "transcripts.jsonl")
    assert len(told) == 9 * 6
    for t in told:
        assert t["segments"][0]["source"] == "prompt"
        assert t["question"] in t["segments"][0]["text"]
        assert t["segments"][1]["source"] == "policy"
        assert len(t["golden_answers"]) == 1 and t["outcome"] in OUTCOMES
        if t["method"] == "protocol":
            shown = [s["text"] for s in t["segments"] if s["source"] == "search"]
            assert sum("<information>" in s for s in shown) == len(t["queries"])
            continue
        assert len(t["segments"]) == 2
        assert t["queries"] == ([t["question"]] if t["method"] == "rag" else [])
        assert ("Doc 1(Title: " in t["segments"][0]["text"]) == (t["method"] == "rag")
    for row in rows:
        mine = [
            t
            for t in told
            if (t["stage"], t["method"]) == (row["stage"], row["method"])
        ]
        assert len({t["id"] for t in mine}) == 6
        assert sum(len(t["queries"]) for t in mine) / 6 == pytest.approx(row["queries"])


@pytest.fixture
def copy(tmp_path):
    return pathlib.Path(shutil.copytree(finished(), tmp_path / "run"))


@pytest.mark.slow
def test_the_command_evaluates_the_newest_checkpoint_and_training_repeats_it(copy):
    """A row from the middle of a stage must not stand for the finished stage."""
    shutil.rmtree(copy / "rl" / "checkpoints" / "3")
    done = run_python("-m", "rsearch.evaluate", *arguments(copy))
    assert done.returncode == 0, done.stderr
    assert "│ rl" in done.stdout and "│ sft" not in done.stdout
    rows = results.read_results(copy)
    assert len(rows) == 9
    assert [r["step"] for r in rows if r["stage"] == "rl"] == [2, 2, 2]
    assert [r["step"] for r in rows if r["stage"] == "sft"] == [60, 60, 60]
    done = run_python("-m", "rsearch.train", *arguments(copy))
    assert done.returncode == 0, done.stderr
    assert without_times(results.read_results(copy)) == without_times(
        results.read_results(finished())
    )


def test_a_changed_metric_is_measured_again(copy):
    changed = dict(eval__normalize="r1_searcher", eval__methods="direct")
    rows = train.main(config(**changed), copy)
    kinds = {(r["stage"], r["method"]): r["normalize"] for r in rows}
    assert kinds["rl", "direct"] == "r1_searcher" and kinds["rl", "rag"] == "squad"
    assert len(rows) == 9
    # Fewer questions count as another dataset, whose rows are added to the others.
    fewer = config(eval__max_questions=4, eval__methods="direct")
    rows = train.main(fewer, copy)
    assert [(r["dataset"], r["n"]) for r in rows[9:]] == [("world:dev[:4]", 4)] * 3
    assert len(rows) == 12
    # A row of other weights of the same step is measured again, but not a row of an
    # earlier version, which names no weights.
    path = copy / "results.json"
    del rows[10]["made_by"]["params"]
    other = {**rows[11], "made_by": {**rows[11]["made_by"], "params": "00000000"}}
    path.write_text(json.dumps([*rows[:11], other]))
    again = train.main(fewer, copy)
    assert again[:11] == rows[:11]
    assert without_times(again[11:]) == without_times(rows[11:])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The finished policy as a Hugging Face directory."""
    setup = load_setup(config(), only_dev=True)
    with mock.patch.object(storage, "read_tree", wraps=storage.read_tree) as read_tree:
        stage, step, params = trained_params(setup, finished())
    assert (stage, step) == ("rl", 3)
    # Without the moments, which are twice as large.
    _, leaves, _ = read_tree.call_args.args
    assert leaves.keys() == {f"params.{name}" for name in checkpoint.named(params)}
    folder = tmp_path_factory.mktemp("export") / "model"
    huggingface.export(folder, params, setup.model.spec, setup.tokenizer)
    return folder


def test_an_exported_policy_has_the_scores_of_its_run(exported, tmp_path):
    command = [*arguments(tmp_path / "run"), f"--model={exported}"]
    done = run_python("-m", "rsearch.evaluate", *command)
    assert done.returncode == 0, done.stderr
    rows = results.read_results(tmp_path / "run")
    assert [(r["stage"], r["step"]) for r in rows] == [(str(exported), None)] * 3
    before = [r for r in results.read_results(finished()) if r["stage"] == "rl"]
    for row, other in zip(without_times(rows), without_times(before), strict=True):
        made_by, of_other = row.pop("made_by"), other.pop("made_by")
        changed = {"model.source", "model.weights"}
        assert {n for n, v in made_by.items() if of_other.get(n) != v} == changed
        assert {**row, "stage": "rl", "step": 3} == other
    told, others = (
        [t["segments"] for t in read_jsonl(folder / "transcripts.jsonl")]
        for folder in (tmp_path / "run", finished())
    )
    assert told == others[-len(told) :]


def evaluate_here(*command):
    return run_command(evaluate_command.main, [*map(str, command)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--modle=x", "unknown flag --modle; did you mean --model?"),
        ("--model=/nowhere/at/all", "/nowhere/at/all"),
        ("--config.eval.methods=rags", "config.eval.methods = 'rags': must be one of"),
        ("--config.eval.methods=rag,rag", "must be names, each once"),
        ("--config.eval.methods=rag:k=3", "rag has the settings top_k, not 'k'"),
        ("--config.eval.methods=rag:top_k=x", "top_k = 'x': must be a whole number"),
        ("--config.data.dev=none.jsonl", "none.jsonl: there is no such file"),
        ("--label_steps=s", "--label_steps: samples"),
        ("--label_actions=s", "--label_actions: samples"),
        ("--methods=rearter:labels=x", "config.eval.temperature = 0"),
        ("--label_steps=s --label_sentences=s", "exclude each other"),
        ("--label_steps=s --methods=rag", "exclude each other"),
    ],
)
def test_an_impossible_evaluation_ends_with_one_line_and_code_2(
    copy, capsys, given, message
):
    before = (copy / "results.json").read_bytes()
    assert evaluate_here(*arguments(copy), *given.split()) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told
    assert (copy / "results.json").read_bytes() == before


@pytest.mark.parametrize("main", [evaluate_command.main, train.command, export.main])
def test_a_wrong_workdir_is_found_before_anything_is_loaded(
    tmp_path, capsys, monkeypatch, main
):
    """Loading may take minutes, for example for an index."""
    run = config(seed=1)
    Workdir(tmp_path, run).close()
    monkeypatch.setattr(
        sys.modules[main.__module__], "load_setup", lambda *a, **k: 1 / 0
    )
    out = [f"--out={tmp_path / 'out'}"] if main is export.main else []
    assert run_command(main, [*arguments(tmp_path), *out]) == 2
    assert "config.seed" in capsys.readouterr().err


def test_a_workdir_must_be_given_and_be_valid(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("dear")
    assert evaluate_here("--config=configs/quickstart.py") == 2
    assert "--workdir=... is missing" in capsys.readouterr().err
    assert evaluate_here(*arguments(tmp_path)) == 2
    assert "not a workdir" in capsys.readouterr().err


@pytest.mark.fault(19, "truncated", "previous one used")
def test_damaged_checkpoints_are_skipped(copy, capsys):
    folder = copy / "rl" / "checkpoints"
    for path in (folder / "3" / "tree").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    setup = load_setup(config(), only_dev=True)
    assert trained_params(setup, copy)[:2] == ("rl", 2)
    assert "3/tree" in capsys.readouterr().err
    assert checkpoint.steps(folder) == [2, 3]  # a reader changes nothing
    shutil.rmtree(folder / "2")
    with pytest.raises(ValueError, match="every checkpoint is damaged: 3"):
        trained_params(setup, copy)


def test_without_a_checkpoint_the_untrained_policy_is_evaluated(tmp_path):
    setup = load_setup(config(), only_dev=True)
    assert trained_params(setup, tmp_path)[:2] == ("start", 0)


@pytest.fixture
def reader_evaluation():
    """R-Search's evaluator, parameters, and chats of its answerer and its reader."""
    names = {"models__answerer__source": "a", "models__reader__source": "r"}
    methods = ("protocol", "evidence", "reader_direct", "reader_rag")
    setup = load_setup(
        config(protocol__name="r_search", eval__methods=methods, **names),
        only_dev=True,
    )
    heard = {"answerer": [], "reader": []}

    def model(name):
        def reply(chats):
            heard[name] += chats
            return [None, *(f" {name} {i} " for i in range(1, len(chats)))]

        return reply

    engines = []
    own = evaluation_parts(setup) | {"load_model": model}
    make_engine = own["make_engine"]

    def counting():
        engine = make_engine()

        def roll_out(*args, **settings):
            engines.append("protocol")
            return engine(*args, **settings)

        roll_out.place_params = engine.place_params
        return roll_out

    evaluator = evaluate.Evaluator(**own | {"make_engine": counting})
    evaluator.rolled_out = engines
    evaluator.setup = setup
    return evaluator, initial_params(setup), heard


def test_a_reader_answers_every_question(reader_evaluation):
    evaluator, params, heard = reader_evaluation
    rows = {}
    for method in ("evidence", "reader_direct", "reader_rag"):
        rows[method], groups = evaluator(params, method)
        answers = [g.rollouts[0].answer for g in groups]
        assert answers == [None, *(f"reader {i}" for i in range(1, 6))]
        row = rows[method]
        assert (row["n"], row["judge_error"], row["asks"]) == (6, 1, "r")
    assert len(heard["reader"]) == 18 and not heard["answerer"]
    # This policy has not learnt to write evidence, so the reader sees none.
    assert heard["reader"][:6] == heard["reader"][6:12]
    assert "given passages:\nDoc 1(Title: " in heard["reader"][12][0]["content"]
    at = {"stage": "s", "step": 1, "digest": ""}
    row = {**at, **rows["evidence"]}
    assert evaluator.is_current(row, **at)
    assert not evaluator.is_current({**row, "asks": "b"}, **at)


def test_methods_ask_a_subject_in_place_of_the_policy():
    def behave(number, body):
        return reply(f"answer {body['messages'][-1]['content'][-9:]}")

    with serving(behave) as endpoint:
        at = {"models__subject__source": endpoint.url, "models__subject__name": "m"}
        setup = load_setup(config(eval__methods=("direct", "replug"), **at))
        params = initial_params(setup)
        evaluator = evaluate.Evaluator(**evaluation_parts(setup))
        row, groups = evaluator(params, "direct")
        answers = [g.rollouts[0].answer for g in groups]
        assert all(answer.startswith("answer ") for answer in answers)
        assert (row["n"], row["asks"]) == (6, endpoint.url)
        assert len(endpoint.requests) == 6
        named = r"eval\.methods = 'replug'.*models\.subject\.source.*likeliest"
        with pytest.raises(ValueError, match=named):
            evaluator(params, "replug")


def test_the_policy_scores_texts_for_a_subject_that_cannot():
    compressed = "selective_context:ratio=0.5"
    asks = {"eval__methods": (compressed,), "eval__scored_by": "policy"}
    alone = load_setup(config(eval__methods=(compressed,)), only_dev=True)
    params = initial_params(alone)
    row, groups = evaluate.Evaluator(**evaluation_parts(alone))(
        params, compressed, digest="d"
    )
    with serving(lambda number, body: reply("Bo")) as endpoint:
        at = {"models__subject__source": endpoint.url, "models__subject__name": "m"}
        setup = load_setup(config(**asks, **at), only_dev=True)
        evaluator = evaluate.Evaluator(**evaluation_parts(setup))
        scored, answered = evaluator(params, compressed, digest="d")
        refused = load_setup(config(**asks | {"eval__scored_by": ""}, **at))
        named = r"selective_context.*of a text.*config\.eval\.scored_by = 'policy'"
        with pytest.raises(ValueError, match=named):
            evaluate.Evaluator(**evaluation_parts(refused))(params, compressed)
    # It is shown what the policy would be; the check at the start asks for one token.
    asked = [body for _, body in endpoint.requests if body["max_tokens"] > 1]
    shown = [body["messages"][-1]["content"] for body in asked]
    prompts = [g.rollouts[0].segments[0].text for g in groups]
    assert len(shown) == 6 and all(any(x in p for p in prompts) for x in shown)
    assert [g.rollouts[0].answer for g in answered] == ["Bo"] * 6
    assert scored["scored_tokens"] == row["scored_tokens"] > 0
    made_by = scored["made_by"]
    assert (made_by["params"], made_by["eval.scored_by"]) == ("d", "policy")
    assert made_by["models.subject.name"] == "m" and "model.dtype" in made_by


def test_the_policys_rollouts_are_reused_for_its_reader(reader_evaluation):
    evaluator, params, _ = reader_evaluation
    evaluator(params, "protocol")
    evaluator(params, "evidence")
    assert evaluator.rolled_out == ["protocol"]
    other = initial_params(evaluator.setup)
    evaluator(other, "evidence")
    assert evaluator.rolled_out == ["protocol"] * 2


def test_a_judge_scores_the_answers_and_its_replies_are_recorded(tmp_path, capsys):
    names = {"models__eval_judge__source": "j", "models__reader__source": "r"}
    settings = {"protocol__name": "r_search", "eval__methods": ("reader_direct",)}
    asked = [{"question": f"Who {i}?", "golden_answers": ["Ada"]} for i in range(6)]
    path = tmp_path / "dev.jsonl"
    path.write_text("\n".join(map(json.dumps, asked)))
    settings |= names | {"data__dev": str(path)}
    setup = load_setup(config(**settings), only_dev=True)
    answers = ["Ada", "Ada L.", "Ada", "Bob", " ", None]
    replies = {
        "Who 0": "True",
        "Who 1": "true.",
        "Who 2": "False",
        "Who 3": "\x1b[31mHm\u202e",
    }
    chats = []

    def judge(asked):
        texts = [chat[0]["content"] for chat in asked]
        chats.extend(texts)
        return [next(r for q, r in replies.items() if q in text) for text in texts]

    models = {"reader": lambda chats: answers, "eval_judge": judge}
    parts = evaluation_parts(setup) | {"load_model": models.get}
    evaluator = evaluate.Evaluator(**parts)
    at = {"stage": "s", "step": 1, "digest": "d"}
    methods, folder = ["reader_direct"], tmp_path / "run"
    evaluate.run_methods(
        evaluator, initial_params(setup), methods=methods, folder=folder, **at
    )
    message = capsys.readouterr().err
    assert "no verdict" in message and not {"\x1b", "\u202e"} & set(message)
    (row,) = results.read_results(folder)
    assert len(chats) == 4 and row["em"] == pytest.approx(2 / 6)
    assert {name: row[name] for name in results.JUDGE_NUMBERS} == {
        "judge": pytest.approx(2 / 6),
        "judge_agreement": pytest.approx(3 / 5),
        "judge_unparsed": 1,
        "judge_failed": 0,
        "judge_right_em_wrong": 1,
        "judge_wrong_em_right": 1,
        "judge_right_steps": 1.0,  # the reader has not searched
    }
    rows = results.read_transcripts(folder)
    expected = [*([reply] for reply in replies.values()), [], []]
    assert [r["judge"]["replies"] for r in rows] == expected
    assert [r["judge"]["score"] for r in rows] == [1, 1, 0, 0, 0, 0]

    assert evaluator.is_current(row, **at)
    for change in (
        {"models__eval_judge__source": ""},
        {"models__eval_judge__name": "other"},
        {"eval__judge_prompt": "graded"},
        {"eval__judge_golds": "any"},
        {"models__eval_judge__temperature": 0.5},
        {"models__eval_judge__max_reply_tokens": 8},
        {"models__reader__max_reply_tokens": 8},
    ):
        other = parts | {"config": config(**settings | change)}
        assert not evaluate.Evaluator(**other).is_current(row, **at), change


@pytest.mark.parametrize("value", ["0.5", [1], True])
def test_a_judges_score_that_is_not_a_number_is_refused(tmp_path, value):
    row = {"stage": "s", "method": "rag", "dataset": "d", "judge": value}
    (tmp_path / "results.json").write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=r"results\.json: row 1: judge = "):
        results.read_results(tmp_path)


def test_a_model_of_a_stage_that_the_run_does_not_have_is_refused(tmp_path, capsys):
    folder = shutil.copytree(finished(), tmp_path / "run")
    given = [
        "--config.eval.methods=protocol",
        "--config.models.answerer.source=stage:sft_x",
    ]
    assert evaluate_here(*arguments(folder), *given) == 2
    message = capsys.readouterr().err
    assert f"'stage:sft_x': the run in {folder} has the stages sft, rl" in message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--config.eval.methods=evidence", r"config.models.reader.source"),
        ("--config.eval.methods=reader_rag", r"config.models.reader.source"),
    ],
)
def test_a_reader_must_be_named_and_the_protocol_have_evidence(
    tmp_path, capsys, given, message
):
    assert evaluate_here(*arguments(tmp_path / "run"), given) == 2
    assert message in capsys.readouterr().err
    more = ["--config.eval.methods=evidence", "--config.models.reader.source=x"]
    assert evaluate_here(*arguments(tmp_path / "run"), *more) == 2
    assert "config.protocol.name = 'search_r1'" in capsys.readouterr().err


def test_a_runs_own_configuration_is_evaluated(copy, capsys):
    """No --config is given; fields set to other values are recorded in the row."""
    before = results.read_results(copy)
    asked = [
        f"--workdir={copy}",
        "--methods=rag:top_k=1,iter_retgen:rounds=1",
        "--sets=world:bridge, short",
        "--config.retrieval.top_k=2",
        "--config.eval.max_questions=2",
        "--config.sets={'short': {'data': {'dev': 'world:dev'}, "
        "'retrieval': {'engine': 'tests.rollout.scripted:find'}}}",
    ]
    assert evaluate_here(*asked) == 0
    messages = capsys.readouterr().err
    assert "evaluated with config.retrieval.top_k = 2" in messages
    # Questions and searches of another set do not count as changes of the run's.
    assert "has changed" not in messages
    starts = json.loads((copy / "run.json").read_text())["starts"]
    named = [[n for n in start["inputs"] if "data.dev" in n] for start in starts[-2:]]
    assert [len(names) for names in named] == [1, 1] and named[0] != named[1]
    assert "world:bridge" in named[0][0] and "data.dev" not in named[1]
    assert any("retrieval.engine=" in name for name in starts[-1]["inputs"])
    rows = results.read_results(copy)
    assert rows[: len(before)] == before
    new = rows[len(before) :]
    assert new[0]["compile_seconds"] > 0 and min(r["seconds"] for r in new) > 0
    assert [(r["dataset"], r["method"]) for r in new] == [
        (name, method)
        for name in ("world:bridge[:2]", "short[:2]")
        for method in ("rag:top_k=1", "iter_retgen:rounds=1")
    ]
    engine = "retrieval.engine=tests.rollout.scripted:find, "  # finds one passage
    settings = ["retrieval.top_k=2", f"{engine}retrieval.top_k=2"]
    assert [r["setting"] for r in new] == [s for s in settings for _ in "12"]
    assert [r["documents"] for r in new] == [1, 2, 1, 1]
    assert [(r["model_calls"], r["searches"]) for r in new] == [(1, 1)] * 4
    assert not (copy / "answers-0.journal").exists()


def test_all_in_a_list_of_methods_stands_for_every_method_that_is_not_named(capsys):
    """Methods that need labels are named beside it, for one table of all methods."""
    named = "rag:top_k=1,skr:labels=x:dataset=y"
    flags = ("--config=configs/search_r1.py:tiny", "--workdir=w", "--print_config")
    assert evaluate_here(*flags, f"--methods={named},all") == 0
    (told,) = re.findall(r"config.eval.methods = (.*)", capsys.readouterr().out)
    first, second, *others = ast.literal_eval(told)
    assert f"{first},{second}" == named
    assert others[0] == "protocol" and {"direct", "cot", "ircot"} < set(others)
    assert not {"rag", "skr", "all", *NEEDS_EXTRA_INPUTS} & set(others)


@pytest.mark.slow
def test_sentences_are_labelled_and_a_method_that_uses_them_is_evaluated(copy, capsys):
    before = results.read_results(copy)
    run, labels = f"--workdir={copy}", copy / "sentences.jsonl"
    few = ("--config.eval.max_questions=4", "--config.retrieval.top_k=2")
    label = [f"--label_sentences={labels}", "--sets=world:train,world:bridge"]
    assert evaluate_here(run, *few, *label, "--methods=rag") == 2
    assert "--methods" in capsys.readouterr().err and not labels.exists()
    assert evaluate_here(run, *few, *label) == 0
    assert results.read_results(copy) == before
    assert not (copy / "label_sentences-0.journal").exists()
    rows = read_jsonl(labels)
    assert len(rows) == 8
    for row in rows:
        assert len(row["sentences"]) == len(row["scores"]) >= 2
        assert all(text.count("\n") == 1 for text in row["sentences"])
        assert max(row["scores"]) < 0
    every = f"recomp_extractive:labels={labels}:sentences=99"
    asked = [run, *few, "--sets=world:dev", f"--methods=rag,{every}"]
    assert evaluate_here(*asked) == 2  # world:bridge's questions are in world:dev
    assert "among those that are labelled" in capsys.readouterr().err
    labels.write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    assert evaluate_here(*asked) == 0
    told = read_jsonl(copy / "transcripts.jsonl")[-8:]
    assert [t["method"] for t in told] == ["rag"] * 4 + [every] * 4
    assert [t["segments"] for t in told[:4]] == [t["segments"] for t in told[4:]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--config.model.width=64", "config.model.width"),
        ("--config.seed=1", "may only change fields of data, eval, models, protocol"),
        ("--sets=a,a", "--sets=a,a: expected names, each once"),
        ("--sets=,", "--sets=,: expected names"),
        ("--sets=nowhere.jsonl", "nowhere.jsonl: there is no such file"),
        ("--sets=world:bridge,world:dew", "world:dew: config.data.dev"),
        ("--sets=world:bridge,nowhere.jsonl", "nowhere.jsonl: there is no such file"),
        ("--methods=ragg", "did you mean 'rag'?"),
        ("--methods=recomp_extractive:labels=none.jsonl", "none.jsonl"),
        ("--label_sentences=/nowhere/at/all", "there is no directory /nowhere/at"),
    ],
)
def test_wrong_flags_of_a_runs_evaluation_are_refused(
    copy, capsys, monkeypatch, given, message
):
    """A wrong dataset is refused before any of several is evaluated."""
    if "," in given:
        monkeypatch.setattr(evaluate_command, "load_setup", lambda *a, **k: 1 / 0)
    before = (copy / "results.json").read_bytes()
    assert evaluate_here(f"--workdir={copy}", given) == 2
    told = capsys.readouterr().err
    assert message in told and "--accept" not in told  # which this command lacks
    assert (copy / "results.json").read_bytes() == before


def test_without_a_run_a_configuration_must_be_given(tmp_path, capsys):
    assert evaluate_here(f"--workdir={tmp_path}") == 2
    assert "holds no run" in capsys.readouterr().err
