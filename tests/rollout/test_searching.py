"""The threads that run searches of rollouts: how many, and when they are given up."""

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
def test_by_default_all_searches_run_on_one_thread():
    """An index or a connection need not be thread-safe."""
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
def test_searches_at_once_may_overlap_and_each_row_reads_its_own_results():
    """The first search waits for the second, which starts while the first row waits."""
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
    search.searches_at_once = 2
    ((group,), script) = play(turns, host=make_host(search))
    for rollout, name in zip(group.rollouts, names, strict=True):
        assert name in rollout.segments[2].text
    assert_rows_held([group], script)


def test_a_search_that_never_returns_ends_the_run_even_if_others_return():
    let_go, thread = threading.Event(), []

    def search(queries):
        if "river" in queries:
            thread.append(threading.current_thread())
            let_go.wait(WAIT)
        else:
            time.sleep(0.02)
        return find(queries)

    others = [["<search> lake </search>", "<search> lake </search>", ANSWERS]] * 60
    search.searches_at_once = 2
    host = make_host(search)
    with pytest.raises(OutageError, match="has not returned"):
        play([[SEARCHES, ANSWERS], *others], num_rows=2, host=host, search_seconds=0.3)
    let_go.set()
    thread[0].join(WAIT)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_an_exception_of_a_search_reaches_the_caller(num_rows):
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
    # The next call is not affected.
    groups, script = play([[SEARCHES, ANSWERS]], num_rows=num_rows)
    assert_rows_held(groups, script)


def test_control_c_does_not_wait_for_a_search():
    is_searching, let_go, thread = threading.Event(), threading.Event(), []

    def search(queries):
        thread.append(threading.current_thread())
        is_searching.set()
        let_go.wait(WAIT)
        return find(queries)

    def interrupt(conversation):
        if conversation.outcome is not None:  # of the sample that does not search
            assert is_searching.wait(WAIT / 2)
            raise KeyboardInterrupt
        return True

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        play([[SEARCHES, ANSWERS], [LONG_ANSWER]], host=make_host(search, interrupt))
    assert time.monotonic() - began < WAIT / 2 and thread[0].is_alive()
    let_go.set()
    thread[0].join(WAIT)


@pytest.mark.fault(36, "call within the process")
@pytest.mark.parametrize(
    "others", [[], [[LONG_ANSWER]] * 3], ids=["alone", "with_others"]
)
def test_a_search_that_never_returns_ends_the_run(others):
    """Nor does the end of the run wait for it: a thread in C code cannot be ended."""
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
