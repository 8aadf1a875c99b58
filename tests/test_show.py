"""rsearch.show: filters, the drawing of rollouts, hostile text."""

import io
import json
import re
import sys

import numpy as np
import pytest

from rsearch import show
from rsearch.config import recipes
from rsearch.evaluation.runs import last_stage
from rsearch.runtime import console
from rsearch.runtime.jsonl import write_jsonl
from rsearch.runtime.workdir import Workdir

HOSTILE = "\x1b[31m[bold red]x[/]\x9b2J \u202eevil :smile:\r]8;;http://h\a"


def transcript(name, answer, *, searches=1, kind="bridge", **fields):
    """Return a line of transcripts.jsonl whose searches all have the same query."""
    policy = {"source": "policy", "text": f"think <search>ask {name}</search>"}
    shown = {"source": "search", "text": f"\n<info>what {name} is</info>\n"}
    last = {"source": "policy", "text": f"<answer>{answer}</answer>"}
    passage = {"id": f"p-{name}", "title": f"T {name}", "score": 0.75}
    return {
        "stage": "rl",
        "method": "protocol",
        "dataset": "d",
        "id": name,
        "kind": kind,
        "question": f"Who is {name}?",
        "golden_answers": ["Paris"],
        "prediction": answer,
        "outcome": "answered" if answer else "malformed",
        "queries": [f"ask {name}"] * searches,
        "passages": [[passage]] * searches,
        "reward": 0.5,
        "reward_parts": {"answer_em": 0.5, "judged": "NaN"},
        "segments": [
            {"source": "prompt", "text": "<|user|>?"},
            *[policy, shown] * searches,
            last,
        ],
    } | fields


ROWS = [
    transcript("right", "paris"),
    transcript("wrong", "Rome", searches=2),
    transcript("silent", None, searches=0, kind="single"),
    transcript("early", "Rome", stage="start"),
    transcript("plain", "Rome", method="rag"),
    transcript("other", "Paris", method="rag", dataset="e"),
]
RL = ["right", "wrong", "silent"]


def rollout(step, number, **fields):
    """Return a line of a step's file of rollouts."""
    evaluated = transcript("q", "Paris")
    segments = [
        {**s, "ids": [1, 2], "sampler_log_probs": [-0.5, -0.25]}
        for s in evaluated["segments"]
    ]
    return {
        "step": step,
        "question_id": "q",
        "question": "Who?",
        "answers": ["Paris"],
        "kind": "bridge",
        "group": 0,
        "rollout": number,
        "outcome": "answered",
        "answer": "Paris",
        "queries": ["ask q"],
        "passages": evaluated["passages"],
        "reward": 1.0,
        "reward_parts": {"answer_em": 1.0},
        "in_loss": True,
        "advantage": 0.5,
        "segments": segments,
    } | fields


def make_run(folder, rows, **steps):
    """Make a run with these transcripts, and rollouts {step_N: lines} of stage rl."""
    config = recipes.apply_overrides(
        recipes.load("configs/base.py"), {"stages": ("sft", "rl")}
    )
    with Workdir(folder, config):
        write_jsonl(folder / "transcripts.jsonl", rows)
        (folder / "rl" / "rollouts").mkdir(parents=True)
        for step, lines in steps.items():
            number = int(step.removeprefix("step_"))
            name = f"step_{number:06}.jsonl.gz"
            write_jsonl(folder / "rl" / "rollouts" / name, lines)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    steps = {
        "step_0": [rollout(0, 0)],
        "step_7": [
            rollout(7, 0, advantage=[0.5, 1.5, -1, -2]),
            rollout(7, 1, in_loss=False, advantage=0.0),
        ],
    }
    return make_run(tmp_path_factory.mktemp("runs") / "run", ROWS, **steps)


@pytest.fixture
def shown(capsys):
    """A function that returns what the command prints for a run and flags."""

    def call(run, *flags):
        assert show.main([str(run), *flags]) == 0
        return capsys.readouterr().out

    return call


def titles(text):
    """Return the ids of the drawn rollouts, in order."""
    return re.findall(r"^(\S+)  .* -+$", text, re.MULTILINE)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ((), RL),
        (("--limit=1",), ["right"]),
        (("--wrong",), ["wrong", "silent"]),
        (("--outcome=malformed",), ["silent"]),
        (("--kind=single",), ["silent"]),
        (("--searches=2",), ["wrong"]),
        (("--id=wrong",), ["wrong"]),
        (("--stage=start",), ["early"]),
        (("--method=rag",), ["plain", "other"]),
        (("--method=protocol,rag",), [*RL, "plain", "other"]),
        (("--method=all", "--dataset=e"), ["other"]),
        (("--method=all", "--dataset=d,e"), [*RL, "plain", "other"]),
        (
            ("--method=all", "--stage=all", "--wrong", "--searches=1"),
            ["early", "plain"],
        ),
        (("--step=0",), ["q"]),
        (("--step=last",), ["q", "q"]),
        (("--step=all", "--stage=rl"), ["q"] * 3),
    ],
)
def test_filters_choose_rollouts(run, shown, flags, expected):
    assert titles(shown(run, *flags)) == expected


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--outcome=lost",), ["--outcome=lost", "answered", "malformed"]),
        (("--stage=rl_x",), ["--stage=rl_x", "rl"]),
        (("--method=ircot",), ["--method=ircot", "rag"]),
        (("--method=rag,ircot",), ["--method=ircot", "rag"]),
        (("--dataset=f",), ["--dataset=f", "d, e"]),
        (("--dataset=",), ["--dataset=", "d, e"]),
        (("--step=3",), ["--step=3", "0", "7"]),
        (("--step=0", "--stage=sft"), ["--stage=sft", "rl"]),
        (("--step=0", "--method=rag"), ["--method=rag", "--step"]),
        (("--step=0", "--dataset=e"), ["--dataset=e", "--step"]),
        (("--limit=-1",), ["--limit=-1"]),
        (("--diff=/nowhere",), ["/nowhere"]),
    ],
)
def test_an_unknown_value_of_a_flag_is_refused(run, flags, words):
    with pytest.raises(ValueError) as refused:
        show.main([str(run), *flags])
    assert all(word in str(refused.value) for word in words)


def test_a_rollout_is_shown_with_its_searches_reward_and_advantages(run, shown):
    text = shown(run, "--step=7", "--limit=1")
    assert "reward    1: answer_em 1" in text and "-2.000 to +1.500" in text
    # The mean advantage of each turn is in its margin.
    assert re.search(r"^ *\+1\.00 \| think <search>ask q</search>$", text, re.MULTILINE)
    assert re.search(r"^ *-1\.50 \| <answer>Paris</answer>$", text, re.MULTILINE)
    box = text[text.index("┌─ ask q ") : text.index("┘")]
    assert "<info>what q is</info>" in box and "[p-q] T q  0.750" in box
    second = shown(run, "--step=7").split("rollout 1")[1]
    assert "out of the loss" in second and " : think" in second


def test_a_repeated_query_has_a_box_for_each_search(run, shown):
    text = shown(run, "--id=wrong")
    assert text.count("┌─ ask wrong ") == text.count("[p-wrong]") == 2


def test_parallel_queries_share_one_box(shown, tmp_path):
    row = transcript("q", "Paris", queries=["ask", "q"])
    text = shown(make_run(tmp_path / "run", [row]))
    assert "┌─ ask | q " in text and text.count("┌") == 1


@pytest.mark.parametrize("width", (40, 80, 200))
def test_no_line_is_wider_than_the_terminal(run, shown, width, monkeypatch):
    monkeypatch.setattr(console, "FILE_COLUMNS", width)
    long = make_run(
        run.with_name(f"long{width}"), [transcript("x" * 300, "word " * 99 + "y" * 300)]
    )
    for text in (shown(long), shown(run, "--step=all"), shown(run, f"--diff={run}")):
        assert max(map(len, text.splitlines())) <= width


def test_two_runs_answers_to_a_question_are_shown_together(run, shown, tmp_path):
    rows = [transcript("silent", "Lyon"), transcript("right", "Nice")]
    other = make_run(tmp_path / "other", rows)
    text = shown(run, f"--diff={other}", "--limit=0")
    assert titles(text) == ["right", "right", "silent", "silent"]
    assert text.index("paris") < text.index("Nice") < text.index("Lyon")


def test_runs_are_compared_in_the_same_setting_which_is_shown(shown, tmp_path):
    changed = {"setting": "retrieval.top_k=5"}
    runs = [
        make_run(
            tmp_path / name,
            [
                transcript("q", f"{name} as trained"),
                transcript("q", f"{name} changed", **changed),
            ],
        )
        for name in ("a", "b")
    ]
    text = shown(runs[0], f"--diff={runs[1]}")
    words = re.findall(r"(\w as trained|\w changed)</answer>", text)
    assert words == ["a as trained", "b as trained", "a changed", "b changed"]
    assert len(re.findall("retrieval.top_k=5", text)) == 2


def test_equal_ids_of_other_questions_are_not_shown_together(shown, tmp_path):
    """Worlds of different seeds number their questions alike."""
    rows = [transcript("same", "Lyon"), transcript("q", "Nice")]
    run = make_run(tmp_path / "run", rows)
    others = [transcript("same", "Rome"), transcript("q", "Oslo", question="Where?")]
    other = make_run(tmp_path / "other", others)
    assert titles(shown(run, f"--diff={other}")) == ["same", "same"]


def test_with_all_stages_each_stage_is_shown_with_its_own(shown, tmp_path):
    stages = ("start", "rl")
    runs = [
        make_run(
            tmp_path / name,
            [transcript("q", f"{name} {stage}", stage=stage) for stage in stages],
        )
        for name in ("a", "b")
    ]
    text = shown(runs[0], f"--diff={runs[1]}", "--stage=all")
    words = re.findall(r"(\w+ \w+)</answer>", text)
    assert words == ["a start", "b start", "a rl", "b rl"]


class Terminal(io.StringIO):
    """A stdout that shows colours."""

    def isatty(self):
        return True


def test_on_a_terminal_observations_are_dim_and_queries_are_bold(run, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stdout", Terminal())
    assert show.main([str(run), "--id=right"]) == 0
    text = sys.stdout.getvalue()
    assert re.search(r"\x1b\[2m<info>what right is</info> *\x1b\[0m", text)
    assert "<search>\x1b[1mask right\x1b[0m</search>" in text


def test_hostile_text_stays_text(shown, tmp_path):
    row = transcript(HOSTILE, HOSTILE, kind=HOSTILE, question=HOSTILE)
    row |= {"golden_answers": [HOSTILE], "reward_parts": {HOSTILE: 1.0}}
    text = shown(make_run(tmp_path / "run", [row]))
    assert not re.search(r"[^\n\x20-\U0010ffff]|[\x7f-\x9f\u202e]", text)
    for words in ("[bold red]x[/]", ":smile:", r"\x1b[31m", r"\u202eevil"):
        assert words in text.replace("\n", "")


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": 3},
        {"passages": 3},
        {"passages": [[{"id": 3}]]},
        {"golden_answers": [3]},
        {"reward": "x"},
        {"reward_parts": [1]},
        {"segments": [{"text": "x", "source": None}]},
    ],
    ids=lambda fields: json.dumps(fields),
)
def test_a_line_that_no_run_could_have_written_is_refused(tmp_path, fields):
    folder = make_run(tmp_path / "run", [transcript("q", "x", **fields)])
    with pytest.raises(ValueError):
        show.main([str(folder)])


def test_transcripts_of_an_earlier_version_are_shown(tmp_path, shown):
    row = transcript("q", "Paris")
    for name in ("passages", "reward", "reward_parts", "kind"):
        del row[name]
    text = shown(make_run(tmp_path / "run", [row]), "--searches=1")
    assert "reward" not in text and "┌─ ask q " in text
    np.testing.assert_equal(titles(text), ["q"])


def test_without_evaluated_stages_the_last_stage_is_the_same_as_for_compare(tmp_path):
    stages = ("start", "elsewhere")
    rows = [transcript("q", "Rome", stage=stage) for stage in stages]
    run = make_run(tmp_path / "run", rows)
    flags = {"stage": "last", "method": "last", "dataset": "all", "step": ""}
    shown = [row["stage"] for row in show.read_rows(run, flags)]
    assert shown == [last_stage(rows, ["sft", "rl"])] == ["start"]


def test_a_verdict_has_the_normaliser_of_its_evaluation(tmp_path, capsys):
    # "Jean-Luc" is right only if a hyphen becomes a space.
    named = {"golden_answers": ["Jean Luc"], "prediction": "Jean-Luc"}
    setting = "eval.normalize=r1_searcher"
    lines = [transcript("a", "", **named), transcript("b", "", **named)]
    lines[1]["setting"] = setting
    run = make_run(tmp_path / "run", lines)
    about = {"stage": "rl", "method": "protocol", "dataset": "d"}
    rows = [
        about | {"setting": "", "normalize": "squad"},
        about | {"setting": setting, "normalize": "r1_searcher"},
    ]
    (run / "results.json").write_text(json.dumps(rows))
    assert show.main([str(run), "--wrong"]) == 0
    assert titles(capsys.readouterr().out) == ["a"]


def test_a_verdict_does_not_depend_on_thoughts(tmp_path, capsys):
    texts = {"a": "<think>Rome?</think> Paris", "b": "<think>Paris"}
    lines = [
        transcript(name, "", golden_answers=["Paris"], prediction=text)
        for name, text in texts.items()
    ]
    assert show.main([str(make_run(tmp_path / "run", lines)), "--wrong"]) == 0
    assert titles(capsys.readouterr().out) == ["b"]
