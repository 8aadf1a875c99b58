"""Small benchmarks of every kind: what is told, not how fast it is."""

import importlib
import json

import pytest

from rsearch import bench
from rsearch.benching.machine import Machine

TINY = ("--shape=tiny", "--repeats=1")
MACHINE = Machine("m", 2, flops=1e15, bandwidth=1e15, is_measured=True)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Subjects without their processes (see tests/benching), which start slowly."""

    def compare(subjects, repeats, **_):
        found = {}
        for name, subject in subjects.items():
            module = importlib.import_module(subject.module)
            once = getattr(module, subject.make)(**subject.settings)
            found[name] = [once() | {"peak_bytes": 1} for _ in range(repeats)]
        return found

    monkeypatch.setattr(bench, "find_machine", lambda: MACHINE)
    for module in bench.KINDS.values():
        monkeypatch.setattr(module, "compare", compare)


def run(tmp_path, capsys, *argv):
    """(rows as JSON, what was printed) of a benchmark that ends well."""
    out = tmp_path / "bench.json"
    assert bench.main([*argv, f"--out={out}"]) == 0
    told = json.loads(out.read_text())
    assert told["machine"]["name"] == "m"
    return told["rows"], capsys.readouterr().out


def test_rollouts_are_measured_beside_a_peer(tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    sizes = ("--batch=2", "--turn_batch=3", "--prompt_tokens=16", "--new_tokens=8")
    rows, printed = run(
        tmp_path,
        capsys,
        "rollout",
        *TINY,
        *sizes,
        "--turns=3",
        "--observation_tokens=9",
    )
    named = {(row["case"], row["subject"]): row for row in rows}
    cases = ("decode, 2 rows", "prefill, 2 rows", "3 turns, 3 rows")
    assert {*named} == {(c, s) for c in cases for s in ("rsearch", "transformers")}
    for (case, subject), row in named.items():
        assert row["low"] <= row["value"] <= row["high"] and not row["missing"]
        ours = named[case, "rsearch"]["value"]
        ratio = None if subject == "rsearch" else pytest.approx(ours / row["value"])
        assert row["ratio"] == ratio and case in printed
    for case in cases[:2]:
        row = named[case, "rsearch"]
        assert row["bound"] in ("FLOPs", "bytes") and 0 < row["share"] < 1
    # The same weights and prompts: both write the same.
    assert named[cases[0], "transformers"]["counts"]["equal tokens"] == 1
    counts = named[cases[2], "rsearch"]["counts"]
    assert counts == {"tokens read per search": 9, "tokens read": 3 * (16 + 2 * 9)}
    again = named[cases[2], "transformers"]["counts"]["tokens read"]
    assert again == 3 * (16 + (16 + 8 + 9) + (16 + 2 * 8 + 2 * 9))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "the first argument must be one of rollout"),
        (["rolout"], "the first argument must be one of rollout"),
        (["rollout", "--repeats=0"], "--repeats=0, expected at least 1"),
        (["rollout", "--cases=decoding"], "--cases=decoding: must be of decode, turns"),
        (["rollout", "--shape=large"], "--shape=large: must be one of smollm2, tiny"),
        (["rollout", "--dtype=int8"], "--dtype=int8: must be one of float32, bfloat16"),
    ],
)
def test_what_cannot_be_measured_is_refused(argv, says):
    with pytest.raises(ValueError, match=says):
        bench.main(argv)
