"""Any exception of a library is reported in one line or counted; the run is saved."""

import pytest

from tests.chaos import injections


@pytest.mark.fault(73, "anything that is raised")
def test_no_call_into_a_library_lets_an_exception_pass_untyped(tmp_path):
    kinds = injections.exceptions()
    chosen = ("OSError EIO", "OSError ESTALE", "OSError ENOMEM", "OSError EAGAIN")
    some = {
        n: e for n, e in kinds.items() if not n.startswith("OSError") or n in chosen
    }
    count, wrong = injections.matrix(tmp_path, errors=some)
    assert count == 2 * len(some) * len(injections.DOORS) and not wrong


@pytest.mark.slow
def test_every_error_at_every_call_into_a_library_is_typed(tmp_path):
    _, wrong = injections.matrix(tmp_path)
    assert not wrong


@pytest.mark.slow
def test_a_run_with_failing_calls_ends_as_an_undisturbed_run(tmp_path):
    assert not injections.disturb(tmp_path, injections=12, seed=0)
