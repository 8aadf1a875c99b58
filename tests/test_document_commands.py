"""Commands of the documents at full size, executed with tiny stand-ins.

A command runs as printed, except that its models, indexes and files are tiny, its
services answer on this machine, at most two questions of a set are asked, and each
stage of a training takes one step.
"""

import gzip
import json
import os
import pathlib
import re
import shutil

import pytest

from rsearch import index
from rsearch.config.recipes import apply_overrides, fields, from_json, load, run_command
from rsearch.config.stage_plan import kind_of, stage_config
from rsearch.data.sets import PREFIX, SETS, find_set
from rsearch.methods.table import expand_all
from rsearch.runtime.metrics import read_metrics
from rsearch.runtime.workdir import read_config
from tests.data.test_published_files import iirc_passages
from tests.data.test_question_layouts import LAYOUTS
from tests.document_commands import (
    COMMANDS_OF_DOCUMENTS,
    Command,
    fields_of,
    flags_of,
    main_of,
    needs_only_a_run,
    run_bash,
    texts_of,
    words_of,
)
from tests.llm.test_endpoint import reply, serving
from tests.models.tiny_bert import write_tiny_bert
from tests.small_run import ROOT, finished, on_one_device, quick_compilation
from tests.test_published import layout

__all__ = ["quick_compilation"]
# Other tests execute the commands about the embedded world and those of extend.md.
OTHER = re.compile(r"world:|:tiny|quickstart|--dry_run|--help|=\.\.\.|gpu_plan")
COMMANDS = [
    # What a document keeps in /shared is here in the working directory.
    command._replace(arguments=tuple(w.replace("=/", "=") for w in command.arguments))
    for command in COMMANDS_OF_DOCUMENTS
    if command.arguments and not OTHER.search(command.text)
    if command.document not in ("docs/extend.md", "docs/learned_methods.md")
    if not needs_only_a_run(command)
]
EXECUTED_NAMES = [
    f"rsearch.{name}" for name in ("evaluate", "export", "index", "plan", "train")
]
EXECUTED = [command for command in COMMANDS if command.name in EXECUTED_NAMES]
# Recipes that need no teacher and that no document trains at full size.
TRAININGS = [
    Command("configs", name, "rsearch.train", (f"--config=configs/{name}",))
    for name in (
        "search_r1.py",
        "search_r1.py:grpo",
        "r1_searcher.py",
        "rag_r1.py:stage2",
    )
]
EXAMPLES = [  # that train the policy which they evaluate
    lines
    for page in ("docs/evaluations.md", "docs/learned_methods.md")
    for lines in texts_of(page)
    if "rsearch.train " in lines
]
SIZES = {  # what does not fit here
    "eval.answer_tokens": 8,
    "eval.max_questions": 2,
    "eval.thought_tokens": 8,
    "mesh.fsdp": 1,
    "mesh.tensor": 1,
    "model.dtype": "float32",
    "rollout.extend_chunk": 32,
    "rollout.max_concurrent": 4,
    "rollout.max_observation_tokens": 16,
    "rollout.max_searches": 1,
    "rollout.max_turn_tokens": 6,
    "rollout.max_written_tokens": 6,
}
STEPS = {
    "critic.warmup_steps": 0,
    "rl.micro_batch": 8,
    "rl.questions_per_step": 32,
    "rl.steps": 1,
    "rl.warmup_steps": 0,
    "sft.batch_size": 8,
    "sft.micro_batch": 8,
    "sft.steps": 1,
    "sft.warmup_steps": 0,
}
DEMONSTRATED = {  # room for the demonstrations of curate.method=oracle
    "rollout.max_observation_tokens": 64,
    "rollout.max_turn_tokens": 160,
}
MODELS = {  # stand-ins of those that a recipe names
    "models.answerer.source": "policy",
    "models.judge.source": "policy",
    "models.writer.source": "policy",
    "retrieval.reranker": "reranker",
}
SERVED = [f"models.{role}.source" for role in ("eval_judge", "judge", "writer")]
SERVED.append("retrieval.url")
FILE_LAYOUTS = {  # words in a file's path: its layout
    "_500": "R1-Searcher",
    "test_subsampled": "IRCoT",
    "iirc": "IIRC",
    "musique_ans": "MuSiQue",
    "rag_r1": "RAG-R1",
    "stage1": "R1-Searcher stage 1",
    "stage2": "R1-Searcher",
    "train": "HotpotQA",
    "dev": "HotpotQA",
}
PASSAGES = [
    {"_id": name, "title": name, "text": f"{name} lies on the Danube."}
    for name in ("Ulm", "Linz", "Wien", "Passau", "Melk", "Krems", "Tulln", "Budapest")
]


def write_lines(path, records):
    """Write records to a file, each on a line or, in a .json file, as a list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(map(json.dumps, records))
    text = (json.dumps(records) if path.suffix == ".json" else lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def question_file(path, size):
    """Write that many questions to a file in the layout that its path stands for."""
    layout = next(name for word, name in FILE_LAYOUTS.items() if word in str(path))
    record = LAYOUTS[layout][0]
    id_names = [n for n in ("_id", "id", "idx", "qid", "question_id") if n in record]
    ids = [dict.fromkeys(id_names, f"q{number}") for number in range(size)]
    records = [record | id_ for id_ in ids]
    write_lines(path, iirc_passages(records) if layout == "IIRC" else records)


def hub(name, configuration, split):
    """Return as many records as the published set has, or 40 to train on."""
    source = f"{name}:{configuration}@{split}" if configuration else f"{name}@{split}"
    sizes = [entry.size for entry in SETS.values() if entry.source == source]
    record = {"question": "Which river?", "golden_answers": ["Danube", "Donau"]}
    return [
        {"id": f"q{number}", **record} for number in range(sizes[0] if sizes else 40)
    ]


def service(number, body):
    """Answer a chat with a verdict, and a search with a page that cannot be read."""
    if "messages" in body:
        return reply("True")
    hit = {"title": "Ulm", "link": "http://10.0.0.1/", "snippet": "On the Danube."}
    return 200, json.dumps({"organic": [hit]}).encode(), {}


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """A folder with models in Hugging Face layout, a corpus and two indexes of it."""
    folder = tmp_path_factory.mktemp("stand_ins")
    corpus = folder / "corpus.jsonl"
    write_lines(corpus, PASSAGES)
    for name, kind in {"index": "--encoder=hashed", "bm25": "--kind=bm25"}.items():
        build = [f"--corpus={corpus}", kind, f"--out={folder / name}"]
        assert run_command(index.main, build) == 0
    layout(folder / "policy", qkv_bias=True, tie_embeddings=True)
    for name in ("encoder", "reranker"):
        (folder / name).mkdir()
        is_reranker = name == "reranker"
        write_tiny_bert(folder / name, cross_encoder=is_reranker, positions=512)
    return folder


def write_inputs(config, folder):
    """Write the files and indexes that a command reads, from those of `folder`."""
    trained = {stage_config(config, stage).data.train for stage in config.stages}
    for source in trained | {config.data.dev}:
        size = None
        if source.startswith(PREFIX):
            source, size = find_set(source)
        if ".json" in source and not os.path.exists(source):
            question_file(pathlib.Path(source), size or 40)
    r = config.retrieval
    for name, path in (("index", r.index), ("bm25", r.bm25_index)):
        if path and not os.path.exists(path):
            shutil.copytree(folder / name, path)
            # Each index is next to its corpus.
            shutil.copy(folder / "corpus.jsonl", pathlib.Path(path).parent)


def execute(command, flags, config, changes, folder):
    """Run a command with stand-ins in the working directory; return its configuration.

    Args:
        command: the command.
        flags: {flag: value} of the command.
        config: its configuration before its own changes.
        changes: {field: value} of stand-ins.
        folder: where `stand_ins` wrote them.
    """
    for link in (ROOT / "configs", folder / "policy", folder / "reranker"):
        pathlib.Path(link.name).symlink_to(link)
    served = [n for n in SERVED if flags.get(f"--config.{n}", "").startswith("https:")]
    with serving(service) as endpoint:
        changes = changes | dict.fromkeys(served, endpoint.url)
        flags = flags | {f"--config.{name}": str(v) for name, v in changes.items()}
        config = apply_overrides(config, fields_of(flags))
        write_inputs(config, folder)
        for name in sets_of(flags):
            known = config.sets.get(name)
            overrides = known.to_dict() if known else {"data.dev": name}
            write_inputs(apply_overrides(config, overrides), folder)
        run(command, flags)
    assert bool(endpoint.requests) == bool(served)
    return config


def run(command, flags):
    """Run a command with these flags."""
    words = [f"{name}={value}" for name, value in flags.items()]
    assert run_command(main_of(command.name), words) == 0


def sets_of(flags):
    """Return the names of --sets."""
    return [name for name in flags.get("--sets", "").split(",") if name]


def stand_in_fields(config):
    """Return {field: value} of a recipe's stand-ins."""
    values = fields(config.to_dict())
    models = {name: model for name, model in MODELS.items() if values[name]}
    return SIZES | models | {"model.source": "policy", "retrieval.encoder": "hashed"}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Work in an empty directory, with a hub that has the published sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", hub)
    for name in ("JUDGE_KEY", "OPENAI_API_KEY", "SERPER_API_KEY"):
        monkeypatch.setenv(name, "x")


def named(name, more=()):
    """Parametrize a test with the commands of this name."""
    chosen = [command for command in (*COMMANDS, *more) if command.name == name]
    ids = [f"{c.document}: {' '.join(c.arguments)[:70]}" for c in chosen]
    return pytest.mark.parametrize("command", chosen, ids=ids)


@pytest.mark.slow
@named("rsearch.plan")
def test_a_plan_at_full_size_fits(command):
    run(command, flags_of(command.arguments))


@pytest.mark.slow
@named("rsearch.index")
def test_an_index_can_be_built(command, stand_ins, offline):
    flags = flags_of(command.arguments)
    write_lines(pathlib.Path(flags["--corpus"]), PASSAGES)
    if "--questions" in flags:
        question_file(pathlib.Path(flags["--questions"]), 3)
    if "--encoder" in flags:
        flags["--encoder"] = str(stand_ins / "encoder")
    run(command, flags)
    assert [*pathlib.Path(flags["--out"]).iterdir()]


@pytest.mark.slow
@named("rsearch.evaluate")
def test_an_evaluation_at_full_size_succeeds(command, stand_ins, offline):
    flags = flags_of(command.arguments)
    folder, before = pathlib.Path(flags["--workdir"]), []
    if "--config" in flags:
        config = load(flags["--config"])
        changes = stand_in_fields(config)
        flags["--model"] = "policy"
    else:
        shutil.copytree(finished(), folder)
        before = json.loads((folder / "results.json").read_text())
        config = from_json(read_config(folder))
        changes = {"eval.max_questions": 2}
    with on_one_device():
        config = execute(command, flags, config, changes, stand_ins)
    rows = json.loads((folder / "results.json").read_text())
    new = [row for row in rows if row not in before]
    methods = flags.get("--methods", ",".join(config.eval.methods)).split(",")
    assert len(new) == len(sets_of(flags) or [""]) * len(methods)
    assert all(row["n"] == 2 for row in new)


def train(command, stand_ins):
    """Run a training, one step of each stage; return {field: value} that did this."""
    flags = {"--workdir": "run", **flags_of(command.arguments)}
    config = load(flags["--config"])
    changes = stand_in_fields(config) | STEPS
    changes |= DEMONSTRATED if "curate" in config.stages else {}
    steps = re.compile(r"overrides\..*\.steps")
    changes |= {name: 1 for name in filter(steps.fullmatch, fields(config.to_dict()))}
    config = execute(command, flags, config, changes, stand_ins)
    folder = pathlib.Path(flags["--workdir"])
    learning = [stage for stage in config.stages if kind_of(stage) in ("sft", "rl")]
    for stage in learning:
        (row,) = read_metrics(folder / stage / "metrics.jsonl")
        assert row["step"] == 0
    assert learning
    return changes


@pytest.mark.slow
@named("rsearch.train", more=TRAININGS)
def test_a_training_at_full_size_takes_a_step_of_each_stage(
    command, stand_ins, offline
):
    train(command, stand_ins)


@pytest.mark.slow
@named("rsearch.export")
def test_a_run_at_full_size_can_be_exported(command, stand_ins, offline):
    flags = flags_of(command.arguments)
    (trained,) = [
        other
        for other in COMMANDS
        if other.name == "rsearch.train"
        if flags_of(other.arguments).get("--workdir") == flags["--workdir"]
        if other.document == command.document
    ]
    for name, value in train(trained, stand_ins).items():
        flags[f"--config.{name}"] = str(value)
    run(command, flags)
    assert (pathlib.Path(flags["--out"]) / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("lines", EXAMPLES, ids=["all", "self_rag", "rearter"])
def test_an_examples_commands_succeed_one_after_another(lines, tmp_path):
    """They run as a user runs them: unchanged, by bash, each in its own process."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    # On eight simulated devices, without optimization, it would take much longer.
    del environment["XLA_FLAGS"]
    run_bash(lines, tmp_path, environment)
    for flags in map(flags_of, words_of([lines])):
        if "--methods" not in flags:
            continue
        rows = json.loads((tmp_path / flags["--workdir"] / "results.json").read_text())
        methods = {row["method"].partition(":")[0] for row in rows}
        expected = expand_all(flags["--methods"].split(","))
        assert methods >= {name.partition(":")[0] for name in expected}
