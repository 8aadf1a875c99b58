"""Measure how a served policy answers many clients at the same time.

    python -m tests.chaos.clients --model=DIR

serves an exported policy and sends it chats with OpenAI's client. Each of 64 clients
sends one chat after another for a minute; every other client streams. It prints the
answers per second, the time until an answer, and the memory of the service. It ends
with code 1 if a request fails or the service does not end cleanly afterwards.
"""

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request

import numpy as np
import openai

from rsearch.bench.child import peak_bytes
from rsearch.config.recipes import REQUIRED, parse_flags, run_command
from rsearch.runtime import console
from tests.hosts.test_processes import free_port
from tests.small_run import ROOT

FLAGS = {
    "model": (REQUIRED, "directory of an exported policy"),
    "questions": ("", "JSON Lines file of questions (default: one question)"),
    "clients": (64, "number of clients that send chats at the same time"),
    "seconds": (60, "for how long they send chats"),
}
QUESTION = "In which city was the director of Silver Harbour born?"
READY_SECONDS = 300.0


async def ask_for_a_while(url, questions, *, clients, seconds):
    """Return ([seconds until each answer], [errors]) of all clients together."""
    durations, errors = [], []
    end = time.monotonic() + seconds

    async def ask(number):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
        model, streams = (await client.models.list()).data[0].id, number % 2 == 1
        while time.monotonic() < end:
            question = questions[(number + len(durations)) % len(questions)]
            started = time.monotonic()
            try:
                reply = await client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": question}],
                    stream=streams,
                )
                if streams:
                    async for _ in reply:
                        pass
            except openai.OpenAIError as error:
                errors.append(repr(error))
            else:
                durations.append(time.monotonic() - started)

    await asyncio.gather(*map(ask, range(clients)))
    return durations, errors


def wait_until_ready(url, process):
    """Wait until the service answers that it is ready."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the service did not become ready")


def main(argv):
    flags = parse_flags(argv, flags=FLAGS)
    questions = [QUESTION]
    if flags["questions"]:
        lines = pathlib.Path(flags["questions"]).read_text().splitlines()
        questions = [json.loads(line)["question"] for line in lines]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "rsearch.serve"),
            *(f"--model={pathlib.Path(flags['model']).resolve()}", f"--port={port}"),
        ],
        cwd=ROOT,
    )
    try:
        wait_until_ready(url, process)
        durations, errors = asyncio.run(
            ask_for_a_while(
                url, questions, clients=flags["clients"], seconds=flags["seconds"]
            )
        )
        peak = peak_bytes(process.pid)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    finally:
        process.kill()
    middle, slow = np.percentile(durations or [np.nan], [50, 99])
    rows = [
        ("clients", flags["clients"]),
        ("answers", len(durations)),
        ("answers a second", round(len(durations) / flags["seconds"], 1)),
        ("seconds of an answer: half within", round(middle, 2)),
        ("... 99 % within", round(slow, 2)),
        ("errors", len(errors)),
        ("memory of the service, MB at most", round(peak / 1e6)),
        ("its exit code", code),
        ("load of the machine", f"{os.getloadavg()[0]:.1f}"),
    ]
    console.table("chats of many clients", ("", "value"), rows)
    for error in errors[:3]:
        console.note(error)
    return int(bool(errors) or not durations or code != 0)


if __name__ == "__main__":
    sys.exit(run_command(main))
