"""Keys that several threads need: one thread asks, and all get the same answer."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rsearch.runtime.recorded import SingleFlight

SECONDS = 20  # how long a thread waits for another before a test fails


class Source:
    """A source that waits until it may answer, with numbers or an error."""

    def __init__(self, error=None):
        self.error, self.asked, self.stored = error, [], {}
        self.begun, self.may_answer = threading.Event(), threading.Event()

    def known(self, keys):
        return {key: self.stored[key] for key in keys if key in self.stored}

    def ask(self, keys):
        self.asked.append(list(keys))
        if "slow" in keys:
            self.begun.set()
            assert self.may_answer.wait(SECONDS)
        if self.error is not None:
            raise self.error
        values = [None if key == "none" else len(self.asked) for key in keys]
        self.stored |= {k: v for k, v in zip(keys, values) if v is not None}
        return values


def overlapping(source, first, *others):
    """Ask for `first`, and for `others` meanwhile; return (futures, early results)."""
    in_flight, has_come = SingleFlight(), [threading.Event() for _ in others]

    def told(keys, event):
        yield from keys
        event.set()  # read to the end: the keys are claimed

    def call(keys):
        return in_flight(keys, read_stored=source.known, fetch=source.ask)

    with ThreadPoolExecutor(1 + len(others)) as pool:
        futures = [pool.submit(call, first)]
        assert source.begun.wait(SECONDS)
        futures += [pool.submit(call, told(*pair)) for pair in zip(others, has_come)]
        assert all(event.wait(SECONDS) for event in has_come)
        # Callers that have nothing to wait for finish before the first one.
        waiting = [f for f, keys in zip(futures, [first, *others]) if "slow" in keys]
        done = [f.result(SECONDS) for f in futures if f not in waiting]
        source.may_answer.set()
        for future in waiting:
            future.exception(SECONDS)
    return futures, done


def test_a_key_is_asked_for_once_and_all_waiting_callers_get_the_answer():
    source = Source()
    futures, _ = overlapping(source, ["slow", "none"], ["slow"], ["none", "slow"])
    told = [future.result() for future in futures]
    assert told == [{"slow": 1, "none": None}, {"slow": 1}, {"none": None, "slow": 1}]
    assert source.asked == [["slow", "none"]]


def test_a_failure_reaches_all_waiting_callers():
    source = Source(error=OSError("away"))
    futures, _ = overlapping(source, ["slow"], ["slow"])
    assert [future.exception() for future in futures] == [source.error] * 2
    assert source.asked == [["slow"]]


def test_a_caller_asks_for_its_own_keys_before_it_waits_for_others():
    source = Source()
    futures, done = overlapping(source, ["slow"], ["slow", "a"], ["b"], [])
    assert sorted(source.asked) == [["a"], ["b"], ["slow"]]
    assert futures[1].result().keys() == {"slow", "a"}
    assert [told.keys() for told in done] == [{"b"}, set()]


def test_known_values_are_returned_while_another_caller_asks_for_more():
    source = Source()
    source.stored["a"] = 7
    _, done = overlapping(source, ["a", "slow"], ["a"])
    assert done == [{"a": 7}] and source.asked == [["slow"]]


def test_an_answered_key_may_be_asked_for_again():
    source, in_flight = Source(), SingleFlight()
    for _ in range(2):
        assert in_flight(["none"], read_stored=source.known, fetch=source.ask) == {
            "none": None
        }
    assert source.asked == [["none"], ["none"]]
    with pytest.raises(ValueError):  # needs as many values as keys
        in_flight(["a", "b"], read_stored=source.known, fetch=lambda keys: [1])
    assert in_flight(["a"], read_stored=source.known, fetch=source.ask) == {"a": 3}
