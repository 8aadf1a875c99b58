"""The recipe for real input, from files to results, run on small files instead."""

import json

import pytest

from rsearch import export, index, train
from rsearch.config import recipes as configuration
from rsearch.config.recipes import run_command
from rsearch.runtime.metrics import read_metrics
from rsearch.setup.load import load_setup
from tests.small_run import (
    arguments,
    config,
    finished,
    one_device,
    quick_compilation,
)

__all__ = ["one_device", "quick_compilation"]
pytestmark = pytest.mark.usefixtures("one_device")

SIZES = {
    "protocol.instruction": "{question}",
    "rollout.max_prompt_tokens": 40,
    "rollout.max_turn_tokens": 24,
    "rollout.max_observation_tokens": 24,
    "rollout.max_concurrent": 8,
    "rollout.group_size": 2,
    "rl.micro_batch": 8,
    "rl.steps": 2,
    "rl.lr": 1e-3,
    "eval.max_questions": 4,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of model/, corpus.jsonl, index/ and questions, as a user has them."""
    folder = tmp_path_factory.mktemp("files")
    out = f"--out={folder / 'model'}"
    assert run_command(export.main, [*arguments(finished()), out]) == 0
    world = load_setup(config()).world
    passages = [{"id": p.id, "contents": p.contents} for p in world.passages]
    write(folder / "corpus.jsonl", passages)
    for split in ("train", "dev"):
        rows = [
            {"id": q.id, "question": q.text, "golden_answers": list(q.golden_answers)}
            for q in getattr(world, split)
        ]
        write(folder / f"{split}.jsonl", rows)
    command = [
        f"--corpus={folder / 'corpus.jsonl'}",
        "--encoder=hashed",
        f"--out={folder / 'index'}",
    ]
    assert run_command(index.main, command) == 0
    return folder


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_smollm2_on_hotpotqa_takes_two_steps(files, tmp_path):
    recipe = configuration.load("configs/smollm2_hotpotqa.py")
    named = {
        "model.source": str(files / "model"),
        "retrieval.encoder": "hashed",
        "retrieval.index": str(files / "index"),
        "data.train": str(files / "train.jsonl"),
        "data.dev": str(files / "dev.jsonl"),
    }
    changed = configuration.apply_overrides(recipe, SIZES | named)
    (row,) = train.main(changed, tmp_path / "run")
    assert (row["stage"], row["step"], row["n"]) == ("rl", 2, 4)
    first, second = read_metrics(tmp_path / "run" / "rl" / "metrics.jsonl")
    assert first["compiles"] == second["compiles"]
    assert first["kl"] == pytest.approx(0, abs=1e-6)  # policy and reference are equal
    assert first["logp_gap"] < 1e-4


def test_smollm2s_longest_rollout_fits_in_a_row_of_its_supervised_stage():
    c = configuration.load("configs/smollm2_hotpotqa.py")
    r = c.rollout
    turns = (r.max_searches + 1) * r.max_turn_tokens
    observations = r.max_searches * r.max_observation_tokens
    assert c.sft.sequence_tokens >= r.max_prompt_tokens + turns + observations
