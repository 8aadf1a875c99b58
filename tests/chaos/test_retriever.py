"""`python -m tests.chaos.retriever` in a short form and in full, both slow."""

import pytest

from tests.chaos import retriever
from tests.chaos.faulty_retriever import FAULTS, JUNK, Proxy, Retriever
from tests.small_run import arguments, child_environment

STEPS = 80
SHORT = dict(
    eval__at_start=False,
    eval__methods="('protocol',)",
    sft__steps=60,
    rl__steps=STEPS,
    checkpoint__rl_steps=STEPS,
    retrieval__cache_size=0,
    retrieval__timeout_seconds=1.8,  # 0.3 s per call
    retrieval__max_retries=1,
)


@pytest.mark.slow
def test_a_run_whose_retriever_fails_in_every_way_ends_well(tmp_path):
    command = arguments(tmp_path / "run", **SHORT)
    words = [word for word in command if not word.startswith("--workdir")]
    server = Retriever(words, tmp_path / "retriever.log")
    proxy = Proxy(server, calm=(1, 0.0), most={"": 2}, rounds=1, lost=1.0)
    try:
        done = retriever.train(
            words,
            tmp_path,
            proxy,
            steps=STEPS,
            seconds=120,
            environment=child_environment(),
        )
    finally:
        proxy.close()
    retriever.report(done)
    assert not retriever.faults_of(done)
    assert all(count for count, _, _ in proxy.table().values())
    assert JUNK not in (tmp_path / "run" / "transcripts.jsonl").read_text()
    assert len(FAULTS) == 12


@pytest.mark.slow
def test_the_quickstart_learns_with_a_failing_retriever(tmp_path, capsys):
    assert retriever.main([f"--workdir={tmp_path}"]) == 0
    assert "EM" in capsys.readouterr().out
