"""Indexes and evaluations of the documents, made with tiny stand-ins.

A command runs as printed, except that its models, indexes and files are tiny, its
services answer on this machine, and at most two questions of a set are asked.
"""

import gzip
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from rsearch import evaluate, index
from rsearch.config.recipes import apply_overrides, fields, from_json, load, run_command
from rsearch.data.sets import PREFIX, SETS, find_set
from rsearch.runtime.workdir import read_config
from tests.data.test_question_layouts import LAYOUTS
from tests.document_commands import COMMANDS_OF_DOCUMENTS, needs_only_a_run, texts_of
from tests.llm.test_endpoint import reply, serving
from tests.models.tiny_bert import write_tiny_bert
from tests.small_run import ROOT, finished, one_device, quick_compilation
from tests.test_published import layout

__all__ = ["one_device", "quick_compilation"]
# Other tests execute the commands about the embedded world and those of extend.md.
EVALUATIONS = [
    command
    for command in COMMANDS_OF_DOCUMENTS
    if command.name == "rsearch.evaluate" and command.arguments
    if not needs_only_a_run(command)
    if command.document not in ("docs/extend.md", "docs/learned_methods.md")
    if "world:" not in command.text and ":tiny" not in command.text
]
EXAMPLES = [  # that train the policy which they evaluate
    lines
    for page in ("docs/evaluations.md", "docs/learned_methods.md")
    for lines in texts_of(page)
    if "rsearch.train " in lines
]
INDEXES = [
    command
    for command in COMMANDS_OF_DOCUMENTS
    if command.name == "rsearch.index" and command.arguments
    if "=..." not in command.text
    if "/shared/" not in command.text  # which the machines of a cluster share
]
SIZES = {  # what does not fit here
    "data.train": "train.jsonl",
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
MODELS = {  # stand-ins of those that a recipe names
    "models.answerer.source": "policy",
    "models.writer.source": "policy",
    "retrieval.reranker": "reranker",
}
SERVED = ("models.eval_judge.source", "models.writer.source", "retrieval.url")
FILE_LAYOUTS = {  # words in a file's name: its layout
    "_500": "R1-Searcher",
    "test_subsampled": "IRCoT",
    "iirc": "IIRC",
    "musique_ans": "MuSiQue",
    "dev": "HotpotQA",
}
PASSAGES = [
    {"_id": str(i), "title": f"T{i}", "text": "On the Danube."} for i in range(9)
]


def write_lines(path, records):
    """Write records to a file, each on a line or, in a .json file, as a list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(map(json.dumps, records))
    text = (json.dumps(records) if path.suffix == ".json" else lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def question_file(path, size):
    """Write that many questions to a file in the layout that its name stands for."""
    layout = next(name for word, name in FILE_LAYOUTS.items() if word in path.name)
    record = LAYOUTS[layout][0]
    id_name = next(n for n in ("_id", "id", "idx", "qid", "question_id") if n in record)
    write_lines(path, [{**record, id_name: f"q{number}"} for number in range(size)])


def hub(name, configuration, split):
    """Return as many records as the published set has."""
    source = f"{name}:{configuration}@{split}" if configuration else f"{name}@{split}"
    (published,) = (entry for entry in SETS.values() if entry.source == source)
    record = {"question": "Which river?", "golden_answers": ["Danube", "Donau"]}
    return [{"id": f"q{number}", **record} for number in range(published.size)]


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


def arguments_of(command):
    """Return {flag: value} of a command."""
    pairs = (word.partition("=") for word in command.arguments)
    return {name: value for name, _, value in pairs}


def stand_in_fields(config):
    """Return {field: value} of a recipe's stand-ins."""
    values = fields(config.to_dict())
    models = {name: model for name, model in MODELS.items() if values[name]}
    return SIZES | models | {"model.source": "policy", "retrieval.encoder": "hashed"}


def write_inputs(config, folder):
    """Write the files and indexes that an evaluation reads, from those of `folder`."""
    source, size = config.data.dev, None
    if source.startswith(PREFIX):
        source, size = find_set(source)
    if ".json" in source:
        question_file(pathlib.Path(source), size or 3)
    r = config.retrieval
    for name, path in (("index", r.index), ("bm25", r.bm25_index)):
        if path and not os.path.exists(path):
            shutil.copytree(folder / name, path)
            # Each index is next to its corpus.
            shutil.copy(folder / "corpus.jsonl", pathlib.Path(path).parent)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", INDEXES, ids=lambda c: f"{c.document}: {c.text[25:99]}"
)
def test_an_index_can_be_built(command, stand_ins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = arguments_of(command)
    write_lines(pathlib.Path(arguments["--corpus"]), PASSAGES)
    if "--questions" in arguments:
        question_file(pathlib.Path(arguments["--questions"]), 3)
    if arguments.get("--encoder", "hashed") != "hashed":
        arguments["--encoder"] = str(stand_ins / "encoder")
    words = [f"{name}={value}" for name, value in arguments.items()]
    assert run_command(index.main, words) == 0
    assert [*pathlib.Path(arguments["--out"]).iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", EVALUATIONS, ids=lambda c: f"{c.document}: {c.text[28:99]}"
)
def test_an_evaluation_at_full_size_can_be_executed(
    command, stand_ins, one_device, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", hub)
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    monkeypatch.setenv("SERPER_API_KEY", "x")
    for link in (ROOT / "configs", stand_ins / "policy", stand_ins / "reranker"):
        pathlib.Path(link.name).symlink_to(link)
    arguments = arguments_of(command)
    run, before = pathlib.Path(arguments["--workdir"]), []
    if "--config" in arguments:
        config = load(arguments["--config"])
        changes = stand_in_fields(config)
        arguments["--model"] = "policy"
    else:
        shutil.copytree(finished(), run)
        before = json.loads((run / "results.json").read_text())
        config = from_json(read_config(run))
        changes = {"eval.max_questions": 2}
    with serving(service) as endpoint:
        for name in SERVED:
            if f"--config.{name}=https:" in command.text:
                changes[name] = endpoint.url
        arguments |= {f"--config.{name}": str(v) for name, v in changes.items()}
        words = [f"{name}={value}" for name, value in arguments.items()]
        config = apply_overrides(config, [w[9:] for w in words if w[:9] == "--config."])
        sets = [name for name in arguments.get("--sets", "").split(",") if name]
        write_inputs(config, stand_ins)
        for name in sets:
            known = config.sets.get(name)
            chosen = known.to_dict() if known else {"data": {"dev": name}}
            write_inputs(apply_overrides(config, chosen), stand_ins)
        assert run_command(evaluate.main, words) == 0
    assert bool(endpoint.requests) == ("=https:" in command.text)
    rows = json.loads((run / "results.json").read_text())
    new = [row for row in rows if row not in before]
    methods = arguments.get("--methods", ",".join(config.eval.methods)).split(",")
    assert len(new) == len(sets or [""]) * len(methods)
    assert all(row["n"] == 2 for row in new)


@pytest.mark.slow
@pytest.mark.parametrize("lines", EXAMPLES, ids=["all", "self_rag", "rearter"])
def test_an_examples_commands_succeed_one_after_another(lines, tmp_path):
    """They run as a user runs them: unchanged, by bash, each in its own process."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    programs = str(pathlib.Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    # On eight simulated devices, without optimization, it would take much longer.
    del environment["XLA_FLAGS"]
    done = subprocess.run(
        ["bash", "-euc", lines],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=7200,
    )
    assert done.returncode == 0, done.stderr
