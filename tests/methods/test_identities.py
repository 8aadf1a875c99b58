"""Methods run on a real model, whatever it has learnt; slow.

Methods that are equal by their definitions give the same answers. How many questions
are in flight, their order and the number of restarts change no answer.
"""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest

from rsearch import evaluate
from rsearch.config.recipes import run_command
from rsearch.evaluation import results
from rsearch.methods.cr_planner import DOCUMENT, SUB_GOALS
from tests.methods import test_cr_planner
from tests.methods.test_adaptive import write_labels
from tests.small_run import (
    ROOT,
    child_environment,
    finished,
    quick_compilation,
    without_times,
)

__all__ = ["quick_compilation"]

SAME = [
    ("rag", "iter_retgen:rounds=1"),
    ("rag:top_k=1", "replug:top_k=1"),
    ("rag:top_k=1", "longllmlingua:rate=1:spread=0:top_k=1"),
    ("rag", "selective_context:ratio=0"),
    ("rag", "ircot:rounds=0:drops_question_words=false"),
    ("flare:always=true:beta=0", "flare:theta=1:beta=0"),
    ("direct", "skr:labels={worse}"),
    ("rag", "skr:labels={better}"),
    ("direct", "adaptive_rag:labels={a}"),
    ("rag", "adaptive_rag:labels={b}"),
    ("ircot", "adaptive_rag:labels={c}"),
    ("direct", "cr_planner:labels={actions}:candidates=1:steps=0"),
    ("rag:top_k=1", "cr_planner:labels={actions}:candidates=1:steps=1:top_k=1"),
]
# Labels of questions that are worded as the held-out ones are, none of which they are.
MIXED = [
    ("In which city is the employer of Jo Ray based?", "rag"),
    ("Which company employs the director of Blue Sky?", "direct"),
    ("In which country lies the birthplace of Jo Ray?", "ircot"),
]
# Each question is answered by one of these, so that their best answers bound its own.
CHOOSING = [
    ("skr:labels={mixed}:k=1", ("direct", "rag")),
    ("adaptive_rag:labels={mixed}", ("direct", "rag", "ircot")),
]
ONE_SEARCH = "flare:theta=0"
NO_SEARCH = "search_o1:max_searches=0"


SETTINGS = ["--config.retrieval.top_k=3", "--config.eval.max_prompt_tokens=2000"]
KILLS = 3  # of one evaluation
# Methods with one call and several, with stop strings, log-probabilities and mixtures.
KINDS = "cot,ircot,flare,sure,replug,longllmlingua"


def new_run(folder):
    """Return a copy of the finished run, without results."""
    run = pathlib.Path(shutil.copytree(finished(), folder / "run"))
    for name in ("results.json", "transcripts.jsonl"):
        (run / name).unlink()
    return run


def evaluated(run, methods, *flags):
    """Evaluate these methods and return the run's transcripts."""
    command = [f"--workdir={run}", f"--methods={methods}", *SETTINGS, *flags]
    assert run_command(evaluate.main, command) == 0
    return results.read_transcripts(run)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """({method: [(prediction, queries, outcome)] of its questions}, labels' paths)."""
    folder = tmp_path_factory.mktemp("identities")
    paths = {
        "better": write_labels(folder / "better", ("A?", "rag")),
        "worse": write_labels(folder / "worse", ("A?", "direct")),
        "a": write_labels(folder / "a", ("A?", "direct", "rag", "ircot")),
        "b": write_labels(folder / "b", ("A?", "rag", "ircot")),
        "c": write_labels(folder / "c", ("A?", "ircot")),
        "mixed": write_labels(folder / "mixed", *MIXED),
        "actions": test_cr_planner.write_labels(
            folder / "actions",
            {("", kind): float(kind == DOCUMENT) for kind in SUB_GOALS},
            test_cr_planner.RATES,
        ),
    }
    methods = {name.format(**paths) for pair in SAME for name in pair}
    methods |= {name.format(**paths) for name, _ in CHOOSING}
    methods = sorted(methods | {ONE_SEARCH, NO_SEARCH})
    rows = evaluated(new_run(folder), ",".join(methods))
    found = {
        method: [
            (row["prediction"], row["queries"], row["outcome"])
            for row in rows
            if row["method"] == method
        ]
        for method in methods
    }
    return found, paths


@pytest.mark.slow
@pytest.mark.parametrize(("method", "other"), SAME)
def test_methods_that_come_to_the_same_thing_answer_alike(answers, method, other):
    found, paths = answers
    other = other.format(**paths)
    assert len(found[method]) == 6 and found[method] == found[other]
    # This model may write no answer in the words of ircot and flare.
    assert any(answer or len(queries) > 1 for answer, queries, _ in found[method])


@pytest.mark.slow
@pytest.mark.parametrize(("method", "others"), CHOOSING)
def test_a_method_that_chooses_answers_as_the_one_it_chose(answers, method, others):
    found, paths = answers
    chosen = [
        [name for name in others if found[name][i] == answer]
        for i, answer in enumerate(found[method.format(**paths)])
    ]
    assert len(chosen) == 6 and all(chosen)
    # At least two of them are chosen.
    assert not set.intersection(*map(set, chosen)), chosen


@pytest.mark.slow
def test_limits_of_searches_hold(answers):
    found, _ = answers
    assert all(len(queries) == 1 for _, queries, _ in found[ONE_SEARCH])
    assert all(not queries for _, queries, _ in found[NO_SEARCH])


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """A run on which the methods KINDS were evaluated, and their transcripts."""
    run = new_run(tmp_path_factory.mktemp("kinds"))
    return run, evaluated(run, KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [4, 64])
def test_neither_batch_rows_nor_question_order_change_an_answer(
    kinds, tmp_path, num_rows
):
    questions = {r["id"]: r for r in kinds[1]}.values()
    names = ("id", "question", "golden_answers")
    lines = [json.dumps({name: r[name] for name in names}) for r in questions]
    random.Random(num_rows).shuffle(lines)
    path = tmp_path / "dev.jsonl"
    path.write_text("\n".join(lines))
    flags = (f"--sets={path}", f"--config.rollout.max_concurrent={num_rows}")
    shuffled = evaluated(new_run(tmp_path), KINDS, *flags)
    given, other = (
        {(r["method"], r["id"]): r["segments"] for r in rows}
        for rows in (kinds[1], shuffled)
    )
    assert given == other and list(given) != list(other)


@pytest.mark.slow
def test_a_killed_evaluation_resumes_to_the_same_rows(kinds, tmp_path):
    run, rng = new_run(tmp_path), random.Random(0)
    environment = os.environ | child_environment()
    command = [sys.executable, "-m", "rsearch.evaluate", f"--workdir={run}"]
    command += [f"--methods={KINDS}", *SETTINGS]
    for _ in range(KILLS):
        sizes = _sizes(run)
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        while process.poll() is None and _sizes(run) == sizes:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 1))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert subprocess.run(command, cwd=ROOT, env=environment).returncode == 0
    rows, undisturbed = map(results.read_results, (run, kinds[0]))
    transcripts = results.read_transcripts(run)
    # A batch of other questions may change the last bits of a probability.
    notes, expected = (
        [row.pop("notes", None) for row in records]
        for records in ([*rows, *transcripts], [*undisturbed, *kinds[1]])
    )
    assert jax.tree.structure(notes) == jax.tree.structure(expected)
    assert jax.tree.leaves(notes) == pytest.approx(jax.tree.leaves(expected), abs=1e-5)
    assert without_times(rows) == without_times(undisturbed)
    assert transcripts == kinds[1]


def _sizes(run):
    """Return the sizes of the files that grow when a question is answered."""
    paths = [*run.glob("answers-*.journal"), *run.glob("transcripts.jsonl")]
    return {p.name: p.stat().st_size for p in paths if p.exists()}
