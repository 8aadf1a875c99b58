"""Train with a retriever that fails in twelve ways; it must end as with a sound one.

    python -m tests.chaos.retriever

trains the quickstart, which calls a service (`python -m rsearch.retriever`) through a
proxy. The proxy fails a few requests, lets some pass, and fails the next few in another
way: the server is killed, stopped or restarted, or replies are errors, slow, truncated,
wrong or huge. In RL each kind of fault alternates between lasting until a search has
failed and ending before that. While held-out questions are asked, faults always end
before that, since a failed search gives a wrong answer.

The run must end with code 0 and learn as much as without faults. It may not stand still
for long, and no rollout with a failed search may enter the loss.
"""

import contextlib
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from rsearch.config.recipes import parse_flags, run_command
from rsearch.evaluation.results import read_results
from rsearch.runtime import console
from rsearch.runtime.metrics import read_metrics
from tests.chaos.faulty_retriever import FAULTS, JUNK, KILLED, Proxy, Retriever
from tests.small_run import ROOT

RECORDED_EM, POINTS = 0.975, 0.03  # from README.md's table; largest accepted drop
MAX_STALL = 30.0  # seconds
QUICKSTART = ["--config=configs/quickstart.py"]
ASKING = ["--config.retrieval.cache_size=0"]  # the cache would soon hold all results
# Number of calls after which a search fails for good. If one call uses up all of its
# time it is one; if each call uses half of the time that is left it is three.
MOST = {"": 4, "stopped": 1, "slow bytes": 3}
FLAGS = {"workdir": ("", "directory that keeps the run (default: a temporary one)")}


class Disturbed(NamedTuple):
    """A run that has ended.

    Attributes:
        code: its exit code.
        log: its output.
        rows: metrics rows of its RL stage.
        results: rows of results.json.
        proxy: the proxy that it called, with all requests.
        stall: most seconds, between the first and the last row of RL, in which no row
            was written, no request was answered and no new search was requested.
    """

    code: int
    log: str
    rows: list
    results: list
    proxy: Proxy
    stall: float


def train(words, folder, proxy, *, steps, seconds, environment) -> Disturbed:
    """Train a run that searches through the proxy.

    Args:
        words: arguments of `python -m rsearch.train` except the workdir and the URL.
        folder: directory of the run and its log.
        proxy: proxy to call; its faults last in all steps of RL but the last.
        steps: number of RL steps.
        seconds: time limit.
        environment: additional environment variables.
    """
    run, written = folder / "run", []
    url = f"http://127.0.0.1:{proxy.port}"
    own = [f"--workdir={run}", f"--config.retrieval.url={url}"]
    metrics, end = run / "rl" / "metrics.jsonl", time.monotonic() + seconds
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rsearch.train", *words, *own],
            cwd=ROOT,
            env={**os.environ, "NO_PROXY": "127.0.0.1", **environment},
            stdout=log,
            stderr=log,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(process.kill)
            while process.poll() is None:
                assert time.monotonic() < end, (
                    f"still running after {seconds} s: {log.name}"
                )
                rows = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
                written += [time.monotonic()] * (rows - len(written))
                proxy.in_full = metrics.exists() and rows < steps - 1
                time.sleep(0.05)
    rows = read_metrics(metrics) if metrics.exists() else []
    return Disturbed(
        process.returncode,
        (folder / "log").read_text(),
        rows,
        read_results(run) if (run / "results.json").exists() else [],
        proxy,
        longest(written, proxy),
    )


def longest(written, proxy) -> float:
    """Return the seconds of the longest stall; see Disturbed."""
    if not written:
        return 0.0
    firsts = {r.search: r.at for r in reversed(proxy.requests)}
    moments = sorted([*written, *proxy.answered, *firsts.values()])
    moments = [m for m in moments if written[0] <= m <= written[-1]]
    return max((b - a for a, b in itertools.pairwise(moments)), default=0.0)


def faults_of(done: Disturbed) -> list[str]:
    """Return what is wrong with the run; [] if it is as good as one without faults."""
    wrong = [] if done.code == 0 else [f"exit code {done.code}:\n{done.log[-3000:]}"]
    for kind, (count, _, _) in done.proxy.table().items():
        if not count:
            wrong.append(f"{kind} never happened")
    if "ConnectError" not in done.log:
        wrong.append(f"{KILLED}: no connection was refused")
    if done.stall > MAX_STALL:
        wrong.append(f"the run stood still for {done.stall:.1f} s")
    if not any(row["tool_error"] for row in done.rows):
        wrong.append("no failed search is counted in the metrics")
    for row in done.rows:
        # Nothing else keeps a rollout out of the loss: see config.rl.mask_truncated.
        left_out = 1 - row["in_loss"]
        if abs(left_out - row["tool_error"] - row["judge_error"]) > 1e-9:
            wrong.append(
                f"step {row['step']}: {left_out:.4f} of the rollouts are not in the "
                f"loss, but {row['tool_error']:.4f} had a failed search"
            )
    return wrong


def em_of(results) -> float:
    """Return the held-out EM of the policy after RL."""
    (row,) = (r for r in results if (r["stage"], r["method"]) == ("rl", "protocol"))
    return row["em"]


def report(done: Disturbed) -> None:
    """Print how often each fault happened, and how the searches ended."""
    print(f"{'failure':20} {'requests':>8} {'searches: went well':>20} {'failed':>7}")
    for kind, (count, well, failed) in done.proxy.table().items():
        print(f"{kind:20} {count:8} {well:20} {failed:7}")
    failed = sum(row["tool_error"] for row in done.rows) / max(1, len(done.rows))
    print(
        f"{len(done.proxy.requests)} requests; {100 * failed:.1f} % of the rollouts "
        f"of RL left out; longest stall {done.stall:.1f} s"
    )


def main(argv) -> int:
    """Run the command; return 1 if something is wrong."""
    given = parse_flags(argv, flags=FLAGS)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        folder = pathlib.Path(given["workdir"] or folder)
        folder.mkdir(parents=True, exist_ok=True)
        proxy = Proxy(Retriever(QUICKSTART, folder / "retriever.log"), most=MOST)
        stack.callback(proxy.close)
        console.note(f"the run's log is {folder / 'log'}")
        done = train(
            QUICKSTART + ASKING,
            folder,
            proxy,
            steps=16,
            seconds=3600,
            environment={"JAX_PLATFORMS": "cpu"},
        )
        wrong = faults_of(done)
        shown = folder / "run" / "transcripts.jsonl"
        if shown.exists() and JUNK in shown.read_text():
            wrong.append("a hit without a score was shown to the policy")
    report(done)
    em = em_of(done.results) if done.results else 0.0
    if em < RECORDED_EM - POINTS:
        wrong.append(f"EM {em:.3f}: without faults it is {RECORDED_EM:.3f}")
    for what in wrong:
        print(f"wrong: {what}")
    print(
        f"{len(FAULTS)} ways to fail, EM {em:.3f}: {'not ' if wrong else ''}as it was"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
