"""Methods that come to the same thing give the same answers, asked of a real run; slow.

Each identity holds by the methods' definitions, whatever the policy has learnt.
"""

import pathlib
import shutil

import pytest

from rsearch import evaluate
from rsearch.config.recipes import run_command
from rsearch.evaluation import results
from tests.methods.test_adaptive import write_labels
from tests.small_run import finished, quick_compilation

__all__ = ["quick_compilation"]

SAME = [
    ("rag", "iter_retgen:rounds=1"),
    ("rag:top_k=1", "replug:top_k=1"),
    ("rag:top_k=1", "longllmlingua:rate=1:spread=0:top_k=1"),
    ("rag", "selective_context:ratio=0"),
    ("direct", "skr:labels={worse}"),
    ("rag", "skr:labels={better}"),
    ("direct", "adaptive_rag:labels={a}"),
    ("rag", "adaptive_rag:labels={b}"),
    ("ircot", "adaptive_rag:labels={c}"),
]
ONE_SEARCH = "flare:theta=0"
NO_SEARCH = "search_o1:max_searches=0"


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """{method: [(prediction, queries) of each question]}, and the labels' paths."""
    folder = tmp_path_factory.mktemp("identities")
    run = pathlib.Path(shutil.copytree(finished(), folder / "run"))
    paths = {
        "better": write_labels(folder / "better", ("A?", "rag")),
        "worse": write_labels(folder / "worse", ("A?", "direct")),
        "a": write_labels(folder / "a", ("A?", "direct", "rag", "ircot")),
        "b": write_labels(folder / "b", ("A?", "rag", "ircot")),
        "c": write_labels(folder / "c", ("A?", "ircot")),
    }
    methods = {name.format(**paths) for pair in SAME for name in pair}
    methods = sorted(methods | {ONE_SEARCH, NO_SEARCH})
    (run / "results.json").unlink()
    (run / "transcripts.jsonl").unlink()
    command = [f"--workdir={run}", f"--methods={','.join(methods)}"]
    command += ["--config.retrieval.top_k=3", "--config.eval.max_prompt_tokens=2000"]
    assert run_command(evaluate.main, command) == 0
    rows = results.read_transcripts(run)
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
    assert any(prediction for prediction, *_ in found[method]) or method == "ircot"


@pytest.mark.slow
def test_limits_of_searches_hold(answers):
    found, _ = answers
    assert all(len(queries) == 1 for _, queries, _ in found[ONE_SEARCH])
    assert all(not queries for _, queries, _ in found[NO_SEARCH])
