"""`python -m tests.chaos.stops`, slow; tests/hosts/test_preemption.py has fast tests.

The time limits assume a machine that runs nothing else.
"""

import pytest

from tests.chaos import stops


@pytest.mark.slow
def test_a_stopped_quickstart_ends_within_seconds_and_saves_its_progress(
    tmp_path, capsys
):
    words = ["--alone=2", "--together=1", f"--workdir={tmp_path}"]
    assert stops.main(words) == 0
    assert "2 processes: median" in capsys.readouterr().out
