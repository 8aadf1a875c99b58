"""`python -m tests.chaos.resume` as slow tests.

A fast test is `test_a_run_interrupted_again_and_again_ends_bit_identical`.
"""

import itertools

import pytest

from tests.chaos import resume
from tests.small_run import quick_compilation

__all__ = ["quick_compilation"]


@pytest.mark.fault(20, "in a save", "in a rename", "in a deletion")
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", resume.ALGORITHMS)
def test_a_run_killed_twenty_times_ends_the_same(algorithm, tmp_path, capsys):
    words = [f"--algorithm={algorithm}", f"--workdir={tmp_path}"]
    assert resume.main(words) == 0
    assert "20 kills, equal to the bit" in capsys.readouterr().out


def test_the_kills_reach_every_place():
    for algorithm in resume.ALGORITHMS:
        coming = itertools.islice(resume.moments(algorithm, 0), 20)
        places = {place for place, _, _ in coming}
        known = resume.IN_SFT if algorithm == "sft" else resume.PLACES
        assert places == set(known)
