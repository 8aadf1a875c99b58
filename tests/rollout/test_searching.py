"""The threads that search for rollouts: so many, heard in time, and given up."""

import threading
import time

import pytest

from rsearch.hosts.preemption import OutageError
from rsearch.types import Passage
from tests.rollout.scripted import (
    ANSWERS,
    LONG_ANSWER,
    SEARCHES,
    WAIT,
    assert_rows_held,
    find,
    make_host,
    people,
    play,
)


@pytest.mark.fault(35, "bounded queue")
def test_nobody_searches_on_two_threads_at_once():
    """An index or a connection need not be safe for that."""
    threads, running = set(), []

    def search(queries):
        running.append(queries)
        assert len(running) == 1
        threads.add(threading.get_ident())
        running.pop()
        return find(queries)

    turns = [[f"{'a' * 7 * i}{SEARCHES}", ANSWERS] for i in range(6)]
    play(turns, people(4), host=make_host(search))
    assert len(threads) == 1 and threading.get_ident() not in threads


@pytest.mark.fault(35, "bounded queue")
def test_as_many_searches_overlap_as_may_and_each_row_reads_its_own():
    """The first waits for the second, which begins when the first row has paused."""
    both, running = threading.Barrier(2), []

    def search(queries):
        running.append(queries)
        assert len(running) <= 2
        if any(query in ("one", "two") for query in queries):
            both.wait(WAIT)
        running.remove(queries)
        return [(Passage("c", f"city\n{query}"),) for query in queries]

    names = ["one", "two", "three", "four"]
    turns = [
        [f"{'a' * 7 * i}<search> {q} </search>", ANSWERS] for i, q in enumerate(names)
    ]
    ((group,), script) = play(turns, host=make_host(search), searches_at_once=2)
    for rollout, name in zip(group.rollouts, names, strict=True):
        assert name in rollout.segments[2].text
    assert_rows_held([group], script)


def test_a_search_that_never_returns_ends_the_run_though_others_do():
    let_go, thread = threading.Event(), []

    def search(queries):
        if "river" in queries:
            thread.append(threading.current_thread())
            let_go.wait(WAIT)
        else:
            time.sleep(0.02)
        return find(queries)

    others = [["<search> lake </search>", "<search> lake </search>", ANSWERS]] * 60
    host = make_host(search)
    with pytest.raises(OutageError, match="has not come back"):
        play(
            [[SEARCHES, ANSWERS], *others],
            num_rows=2,
            host=host,
            search_seconds=0.3,
            searches_at_once=2,
        )
    let_go.set()
    thread[0].join(WAIT)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_what_a_search_raises_reaches_the_caller(num_rows):
    class Broken(Exception):
        pass

    def search(queries):
        raise Broken(queries)

    before = threading.active_count()
    with pytest.raises(Broken, match="river"):
        play(
            [[SEARCHES, ANSWERS], [LONG_ANSWER]],
            num_rows=num_rows,
            host=make_host(search),
        )
    assert threading.active_count() == before
    # The next call is as if nothing had been.
    groups, script = play([[SEARCHES, ANSWERS]], num_rows=num_rows)
    assert_rows_held(groups, script)


@pytest.mark.fault(36, "call within the process")
@pytest.mark.parametrize("others", [[], [[LONG_ANSWER]] * 3], ids=["alone", "beside"])
def test_a_search_that_never_returns_ends_the_run(others):
    """It is not waited for at the end either: a thread in C code cannot be ended."""
    let_go, thread = threading.Event(), []

    def search(queries):
        thread.append(threading.current_thread())
        let_go.wait(WAIT)
        return find(queries)

    began = time.monotonic()
    message = "a search has not returned for 0.3 s"
    with pytest.raises(OutageError, match=message):
        play([[SEARCHES, ANSWERS], *others], host=make_host(search), search_seconds=0.3)
    assert time.monotonic() - began < WAIT / 2 and thread[0].is_alive()
    let_go.set()
    thread[0].join(WAIT)
