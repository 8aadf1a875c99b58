"""rsearch.evaluate: sets of config.sets and the settings of their rows."""

import json
import pathlib
import shutil

from rsearch.config.recipes import run_command
from rsearch.evaluate import main as evaluate
from rsearch.evaluation import results
from tests.small_run import finished, quick_compilation

__all__ = ["quick_compilation"]


def test_rows_of_a_set_that_is_defined_in_another_way_are_kept(tmp_path):
    """A set has no setting if the run's own configuration defines it like this."""

    def define(top_k, dev):
        return {"short": {"data": {"dev": dev}, "retrieval": {"top_k": top_k}}}

    copy = pathlib.Path(shutil.copytree(finished(), tmp_path / "run"))
    run = json.loads((copy / "config.json").read_text())
    run["config"]["sets"] = define(1, "world:dev")
    (copy / "config.json").write_text(json.dumps(run))
    asked = [f"--workdir={copy}", "--sets=short", "--methods=rag"]
    asked += ["--config.eval.max_questions=1"]
    for definition in ((1, "world:dev"), (2, "world:dev"), (2, "world:bridge")):
        assert (
            run_command(evaluate, [*asked, f"--config.sets={define(*definition)}"]) == 0
        )
    # The set's own number of passages counts.
    assert run_command(evaluate, [*asked, "--config.retrieval.top_k=2"]) == 0
    rows = [r for r in results.read_results(copy) if r["dataset"] == "short[:1]"]
    assert [(r["setting"], r["documents"]) for r in rows] == [
        ("retrieval.top_k=2", 2),
        ("data.dev=world:bridge, retrieval.top_k=2", 2),
        ("", 1),
    ]
