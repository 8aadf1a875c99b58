"""What the dry run prints and refuses, without loading anything."""

import json
import re

import pytest

from rsearch import train
from rsearch.config import recipes as configuration
from rsearch.config.recipes import run_command


def run(*words):
    return run_command(train.command, ["--dry_run", *words])


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a dry run loads nothing")

    monkeypatch.setattr("rsearch.train.main", refuse)
    monkeypatch.setattr("rsearch.train.load_setup", refuse)


def rows(text):
    """Return [cells] of every row of every table."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_a_dry_run_prints_stages_budgets_and_memory(capsys):
    words = ["--config=configs/rag_r1.py:sq", "--devices=8", "--device_memory_gb=80"]
    assert run(*words) == 0
    table = rows(capsys.readouterr().out)
    stages = [row for row in table if len(row) == 5]
    assert [row[0] for row in stages] == ["curate_sft", "sft", "curate_rl", "rl"]
    assert stages[0][2:4] == ["Qwen/Qwen2.5-72B-Instruct", "72.7 B"]
    assert stages[1][2] == "Qwen/Qwen2.5-7B-Instruct"
    assert stages[3][1:4] == ["policy, ppo", "that of sft", "7.62 B"]
    budget = {row[1]: row[2] for row in table if row[0] == "rl" and len(row) == 3}
    assert budget["tokens of a rollout"].startswith(
        "prompt 1,024 + 5 turns x 500 + 4 observations x 1,000 = 7,524"
    )
    assert budget["a step"].startswith("512 questions x 1 = 512 rollouts")
    assert budget["an update"] == "4 a step, each 128 rows, 64 a micro-batch"
    assert budget["all steps"] == "500 = 256,000 rollouts of 256,000 questions, " + (
        "2,000 updates"
    )
    total, own = 256_000 * 7524, 256_000 * 5 * 500
    expected = f"at most {total:,}, of which the policy writes {own:,}"
    assert budget["all tokens"] == expected
    assert float(budget["Adam moments"]) == pytest.approx(7.62 * 8 / 8, abs=0.02)


def test_without_a_forced_last_turn_the_policy_writes_one_turn_less(capsys):
    forced = "--config.rollout.forced_final_turn=False"
    assert run("--config=configs/rag_r1.py:sq", forced) == 0
    table = rows(capsys.readouterr().out)
    budget = {row[1]: row[2] for row in table if row[0] == "rl" and len(row) == 3}
    assert budget["all tokens"].endswith(f"the policy writes {256_000 * 4 * 500:,}")


def test_the_policy_writes_no_more_than_the_context_holds(capsys):
    words = ["--config.rollout.max_searches=8", "--config.rollout.context_tokens=3100"]
    assert run("--config=configs/rag_r1.py:sq", *words) == 0
    table = rows(capsys.readouterr().out)
    budget = {row[1]: row[2] for row in table if row[0] == "rl" and len(row) == 3}
    total = f"{256_000 * 3100:,}"  # nine turns of 500 tokens would be more
    assert (
        budget["all tokens"] == f"at most {total}, of which the policy writes {total}"
    )


def test_imitation_is_counted_in_demonstrations(capsys):
    assert run("--config=configs/rearag.py") == 0
    table = rows(capsys.readouterr().out)
    budget = {row[1]: row[2] for row in table if row[0] == "sft" and len(row) == 3}
    assert budget["a step"] == "64 demonstrations, 64 a micro-batch"
    expected = f"625 = 40,000 demonstrations, at most {40_000 * 8192:,} tokens"
    assert budget["all steps"] == expected


def test_the_peak_of_an_sft_stage_may_be_that_of_its_evaluation(capsys):
    words = ["--config=configs/rearag.py", "--config.rollout.max_concurrent=600"]
    assert run(*words) == 0
    table = rows(capsys.readouterr().out)
    actual = {row[1]: row[2] for row in table if row[0] == "sft" and len(row) == 3}
    parts = [float(size) for what, size in actual.items() if "evaluation: " in what]
    assert len(parts) == 4
    peak = float(actual["peak on each of 8 devices"])  # shown with fewer digits
    assert peak == pytest.approx(sum(parts), rel=1e-3)


@pytest.mark.parametrize(
    ("recipe", "stage", "what", "most"),
    [
        ("rag_r1.py:sq", "curate_sft", "rollouts of a question", 1),
        (
            "rag_r1.py:sq",
            "curate_rl",
            "rollouts of a question",
            10,
        ),  # in addition to the first
        # Until 21 are reached, in rounds of a group of 16.
        ("r1_searcher.py:select", "curate_retrieve", "rollouts of a question", 32),
        ("rearag.py", "curate", "turns of a chain", 25 + 20),
        ("rearag.py:no_reasoning", "curate", "rollouts of a question", 1),
    ],
)
def test_a_data_stage_says_how_often_its_model_is_called(
    recipe, stage, what, most, capsys
):
    assert run(f"--config=configs/{recipe}") == 0
    table = rows(capsys.readouterr().out)
    budget = {row[1]: row[2] for row in table if row[0] == stage and len(row) == 3}
    assert budget[what] == f"at most {most}"


def test_a_chain_may_search_in_every_step_but_the_last(capsys):
    """This holds regardless of the number of searches in rollouts of other stages."""
    words = ["--config.overrides.curate.curate.max_steps=30"]
    words += ["--config.overrides.curate.rollout.max_written_tokens=256"]
    assert run("--config=configs/rearag.py", *words) == 0
    assert "+ 30 turns x 256 + 29 observations" in capsys.readouterr().out


@pytest.mark.fault(42, "device memory")
def test_memory_beyond_the_devices_is_refused(capsys):
    words = ["--config=configs/search_r1.py", "--devices=8", "--device_memory_gb=20"]
    assert run(*words) == 2
    captured = capsys.readouterr()
    peak = re.search(r"peak on each of 8 devices *│ *([\d.]+)", captured.out)[1]
    assert f"rl: {float(peak):.1f} GB on each of 8" in captured.err
    assert "does not fit devices of 20 GB" in captured.err


@pytest.mark.fault(4, "context")
def test_a_context_beyond_the_models_is_refused(capsys):
    words = ["--config=configs/r_search.py", "--config.rollout.max_turn_tokens=9000"]
    assert run(*words) == 2
    assert (
        "the context of Qwen/Qwen2.5-7B-Instruct is 32,768" in capsys.readouterr().err
    )


@pytest.mark.fault(4, "batch")
def test_batches_that_do_not_divide_are_refused(capsys):
    assert run("--config=configs/r_search.py", "--config.rl.micro_batch=7") == 2
    assert "config.rl.micro_batch = 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("protocol.name=r_serch", "config.protocol.name = 'r_serch': must be one of"),
        ("reward.evidence_f1.weigth=1", "config.reward.evidence_f1.weigth"),
        ("models.judge.source=", "config.reward.evidence_f1 asks a judge: name one in"),
        (
            "overrides={'rl': {'reward': {'answer_me': {}}}}",
            "config.overrides.rl: unknown reward term config.reward.answer_me",
        ),
        (
            "overrides={'rl': {'protocol': {'name': 'r1'}}}",
            "config.overrides.rl: config.protocol.name = 'r1': must be one of",
        ),
    ],
)
def test_unknown_names_are_refused(capsys, word, message):
    assert run("--config=configs/r_search.py", f"--config.{word}") == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_devices_reserved_for_rollouts_are_not_planned(capsys):
    ahead = ("--config.rl.max_staleness=1", "--config.rollout.devices=4")
    assert run("--config=configs/r_search.py", *ahead) == 2
    assert "config.rollout.devices = 4: in a plan all" in capsys.readouterr().err


def test_devices_that_the_mesh_does_not_divide_are_refused(capsys):
    assert run("--config=configs/r_search.py", "--devices=12") == 2
    assert "mesh does not fit" in capsys.readouterr().err


def test_with_half_the_devices_per_host_each_holds_twice_the_kv_cache(capsys):
    """A step has more rollouts than the hosts decode concurrently."""
    actual = []
    for number in (8, 4):
        words = ["--config=configs/search_r1.py:grpo", "--devices=16"]
        assert run(*words, f"--devices_per_host={number}") == 0
        table = rows(capsys.readouterr().out)
        actual += [float(row[2]) for row in table if row[1].endswith("keys and values")]
    assert actual[1] == pytest.approx(2 * actual[0], abs=0.02) and actual[0] > 1
    assert run(*words, "--devices_per_host=0") == 2
    assert "--devices_per_host=0: must be 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--devices=-3", "--device_memory_gb=nan"])
def test_impossible_devices_are_refused(capsys, flag):
    assert run("--config=configs/r_search.py", flag) == 2
    assert f"{flag}: must be 0 or more" in capsys.readouterr().err


def test_the_memory_of_a_model_that_the_run_makes_is_not_known_before(capsys):
    assert run("--config=configs/quickstart.py", "--device_memory_gb=1") == 0
    assert "not known before" in capsys.readouterr().out


def test_without_devices_the_smallest_mesh_counts(capsys):
    config = configuration.load("configs/rearag.py")
    assert run("--config=configs/rearag.py") == 0
    num = config.mesh.fsdp * config.mesh.tensor
    assert f"peak on each of {num} devices" in capsys.readouterr().out


def test_local_questions_are_counted_and_missing_files_are_named(tmp_path, capsys):
    flags = "--config=configs/search_r1.py:3b", "--config.retrieval.index=none"
    questions = tmp_path / "questions.jsonl"
    lines = [{"question": f"q{i}", "golden_answers": ["a"]} for i in range(512)]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(*flags, f"--config.data.train={questions}") == 0
    (line,) = [
        text for text in capsys.readouterr().err.splitlines() if "not checked" in text
    ]
    assert "config.retrieval.index = 'none'" in line and "data.train" not in line
    questions.write_text(json.dumps(lines[0]) + "\n")
    assert run(*flags, f"--config.data.train={questions}") == 2
    assert "gives 1 questions, fewer than" in capsys.readouterr().err


def test_a_run_that_names_no_index_is_refused(capsys):
    assert run("--config=configs/smollm2_multihop.py") == 2
    assert "config.retrieval.index is empty" in capsys.readouterr().err


def test_missing_files_of_supervised_stages_are_named_and_directories_read(
    tmp_path, capsys
):
    flags = "--config=configs/quickstart.py", f"--config.data.train={tmp_path}/saved"
    assert run(*flags, "--config.sft.demonstrations=d", "--config.sft.chats=c") == 0
    (line,) = [
        text for text in capsys.readouterr().err.splitlines() if "not checked" in text
    ]
    named = re.findall(r"config\.(\S+) = ", line)
    assert named == ["data.train", "sft.demonstrations", "sft.chats"]
    from datasets import Dataset

    rows = [{"question": f"q{i}", "golden_answers": ["a"]} for i in range(2)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert run(*flags) == 2
    assert "gives 2 questions, fewer than" in capsys.readouterr().err
