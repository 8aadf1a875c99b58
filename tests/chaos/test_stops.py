"""`python -m tests.chaos.stops`, slow; tests/hosts/test_preemption.py has quick ones.

Seconds are of a machine with nothing beside it.
"""

import pytest

from tests.chaos import stops


@pytest.mark.slow
def test_the_quickstart_ends_within_seconds_with_all_it_had(tmp_path, capsys):
    words = ["--alone=2", "--together=1", f"--workdir={tmp_path}"]
    assert stops.main(words) == 0
    assert "2 processes: median" in capsys.readouterr().out
