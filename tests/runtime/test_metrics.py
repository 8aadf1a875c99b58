"""metrics.jsonl holds what was measured, whatever happens to the run."""

import ast
import contextlib
import html
import json
import math
import re
import resource
import struct
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.runtime import console
from rsearch.runtime.metric_table import GROUPS, METRICS, metrics_page
from rsearch.runtime.metrics import MetricsLog, read_metrics
from tests.small_run import ROOT


def strict(text):
    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


@contextlib.contextmanager
def files_limited_to(num_bytes):
    """Make writes beyond fail as on a full disk: a part is written, then an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


numbers = st.floats(allow_nan=True) | st.integers() | st.booleans() | st.none()


@given(values=st.dictionaries(st.text().filter(lambda s: s != "step"), numbers))
def test_numbers_come_back_as_they_were_and_the_file_is_strict_json(
    tmp_path_factory, values
):
    folder = tmp_path_factory.mktemp("log")
    with MetricsLog(folder, tensorboard=False) as log:
        log.write(3, values)
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    assert strict(line)["step"] == 3
    (row,) = read_metrics(folder / "metrics.jsonl")
    assert row.pop("step") == 3 and row.keys() == values.keys()
    for name, value in values.items():
        is_nan = isinstance(value, float) and math.isnan(value)
        assert math.isnan(row[name]) if is_nan else row[name] == value


def test_scalar_arrays_are_logged_as_numbers_and_others_are_refused(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(
            np.int64(0),
            {
                "float": jnp.float32(0.5),
                "half": jnp.bfloat16(1.5),
                "int": jnp.int32(7),
                "bool": np.bool_(True),
                "nan": jnp.float32(jnp.nan),
                "text": "grpo",
            },
        )
        with pytest.raises(AssertionError, match=r"loss is no scalar: shape \(2,\)"):
            log.write(1, {"loss": jnp.ones(2)})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(row.pop("nan"))
    assert row == {
        "step": 0,
        "float": 0.5,
        "half": 1.5,
        "int": 7,
        "bool": True,
        "text": "grpo",
    }


def test_row_is_in_the_file_when_write_returns(tmp_path):
    log = MetricsLog(tmp_path, tensorboard=False)
    log.write(0, {"loss": 2.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": 2.0}]
    log.close()


def test_resuming_drops_rows_after_the_checkpoint(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        for step in range(6):
            log.write(step, {"loss": step / 2})
    with MetricsLog(tmp_path, first_step=4, tensorboard=False) as log:
        log.write(4, {"loss": 9.0})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1]["loss"] == 9.0


@pytest.mark.parametrize("cut", range(1, 22))
def test_torn_last_line_is_dropped_wherever_it_was_torn(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "x": 1}\n' + b'{"step": 1, "x": 22}\n'[:cut])
    expected = [0] if cut < 21 else [0, 1]
    assert [row["step"] for row in read_metrics(path)] == expected
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(2, {"x": 3})
    assert [row["step"] for row in read_metrics(path)] == [*expected, 2]


@pytest.mark.parametrize(
    "line", ["junk", "[1]", '{"x": 1}', '{"step": "1"}', "", '{"step": true}']
)
def test_bad_line_is_left_out_and_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:2: "):
        rows = read_metrics(path)
    assert rows == [{"step": 0}, {"step": 2}]


@pytest.mark.fault(84, "damaged row", "gap in the rows", "later good records")
def test_a_damaged_row_is_set_aside_and_a_gap_is_reported(tmp_path, capsys):
    path, bad = tmp_path / "metrics.jsonl", b'{"step": 1, "lo\xff}\n[1]\n'
    torn = b'{"step": 5, "lo'
    good = [b'{"step": %d, "loss": 0.5}\n' % step for step in (0, 2, 4)]
    path.write_bytes(good[0] + bad + good[1] + good[2] + torn)
    with MetricsLog(tmp_path, first_step=4, tensorboard=False) as log:
        log.write(4, {"loss": 0.25})
    assert [row["step"] for row in read_metrics(path)] == [0, 2, 4]
    assert path.with_name("metrics.jsonl.damaged").read_bytes() == bad + torn + b"\n"
    damage, gap = capsys.readouterr().err.splitlines()
    assert f"{path}:2: " in damage and "2 more" in damage
    assert f"{path}: 2 of the rows before step 4" in gap and "step 1 to 3" in gap
    with MetricsLog(tmp_path, first_step=1, tensorboard=False):
        assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "values",
    [{"x": [1]}, {"x": {}}, {"x": 10**400}, {"x": math.nan}, {"x": -math.inf}],
)
def test_a_row_with_values_that_are_never_logged_is_left_out(tmp_path, values):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 0} | values) + "\n")
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:1: "):
        assert read_metrics(path) == []


def test_a_full_disk_raises_and_leaves_complete_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(0, {"loss": 1.0})
        before = path.read_bytes()
        for _ in range(2):
            with files_limited_to(len(before) + 7), pytest.raises(OSError):
                log.write(1, {"loss": 2.0})
            assert path.read_bytes() == before
        log.write(1, {"loss": 2.0})  # room again: the run continues
    assert [row["step"] for row in read_metrics(path)] == [0, 1]


def events(folder):
    """[Event] of the only event file in a folder."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (folder / "tensorboard").iterdir()
    raw, actual = path.read_bytes(), []
    while raw:  # length, its checksum, the event, its checksum
        (size,) = struct.unpack("<Q", raw[:8])
        actual.append(Event.FromString(raw[12 : 12 + size]))
        raw = raw[16 + size :]
    return actual


def summaries(folder):
    """[(step, value)] of the only event file in a folder."""
    return [(event.step, v) for event in events(folder) for v in event.summary.value]


def test_curves_hold_the_numbers_at_their_steps(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(5, {"loss": 0.25, "name": "grpo", "reward": 1})
        log.write(6, {"loss": 0.125, "reward_answer_em": 1, "mine": 2})
    actual = [(step, v.tag, v.simple_value) for step, v in summaries(tmp_path)]
    assert actual == [
        *((5, "optim/loss", 0.25), (5, "reward/reward", 1.0)),
        *((6, "optim/loss", 0.125), (6, "reward/answer_em", 1.0)),
        (6, "other/mine", 2.0),
    ]


HOSTILE = [
    "<script>alert(1)</script>",
    "</code></pre><b>x</b>\n    ```\n~~~\n\n# a\n| a | b |\n|---|---|\n&lt;&amp;",
    "[a](javascript:b) ![c](http://d/e.png)\x1b[31m\x02\r\u202e",
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_tensorboard_shows_a_text_unchanged(tmp_path, hostile):
    plugins = pytest.importorskip("tensorboard.plugin_util")
    with MetricsLog(tmp_path) as log:
        log.draw(3, {}, [hostile])
    ((step, value),) = summaries(tmp_path)
    assert (step, value.metadata.plugin_data.plugin_name) == (3, "text")
    shown = plugins.markdown_to_safe_html(value.tensor.string_val[0].decode())
    code = re.fullmatch("<pre><code>([^<>]*)\n</code></pre>", shown)
    assert code and html.unescape(code[1]) == console.clean(hostile)


def test_histograms_hold_the_finite_numbers_under_their_own_tags(tmp_path):
    with MetricsLog(tmp_path) as log:
        numbers = np.array([[1.0, math.nan], [3.0, 3.0]])
        log.draw(2, {"reward": numbers, "searches": np.array([])})
        log.write(2, {"reward": 7 / 3})
    (_, drawn), (_, written) = summaries(tmp_path)
    assert drawn.tag != written.tag and "reward" in drawn.tag
    assert (drawn.histo.num, drawn.histo.sum, drawn.histo.max) == (3, 7, 3)


def test_every_metric_of_the_table_is_measured_and_documented():
    """Each name in the table occurs in the code that measures; patterns are skipped."""
    texts = {
        node.value
        for folder in ("learn", "stages", "rollout", "")
        for path in (ROOT / "rsearch" / folder).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    texts |= {f"{text}_seconds" for text in texts} | {f"dev_{text}" for text in texts}
    assert not {name for name in METRICS if "*" not in name} - texts
    assert {group for group, _ in METRICS.values()} == GROUPS.keys()
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_page()


def test_curves_restart_at_the_step_where_the_run_resumes(tmp_path):
    with MetricsLog(tmp_path, first_step=4) as log:
        log.write(4, {"loss": 0.5})
    starts = [e.step for e in events(tmp_path) if e.HasField("session_log")]
    assert starts == [4]


@pytest.mark.fault(47, "failing")
def test_failing_curves_warn_once_and_lose_no_row(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where the directory should be")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with MetricsLog(tmp_path) as log:
            log.write(0, {"loss": 1.0})
            log.write(1, {"loss": 2.0})
    told = [str(w.message) for w in caught if "TensorBoard" in str(w.message)]
    assert len(told) == 1 and "metrics.jsonl is still written" in told[0]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
