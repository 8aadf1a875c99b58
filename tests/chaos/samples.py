"""Small files of each kind that a stranger gives, and what reads them."""

import gzip
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np

from rsearch.config.recipes import load, parse_command_line, validate
from rsearch.data.corpus import Corpus
from rsearch.data.questions import load_questions
from rsearch.evaluation.evaluator import read_results
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.hf.families import read_spec
from rsearch.models.tokenizer import load_tokenizer
from rsearch.retrieval.encoder import HashedNgrams, load_encoder
from rsearch.retrieval.index import open_index
from rsearch.retrieval.index_build import build_index
from rsearch.runtime import checkpoint
from rsearch.runtime.jsonl import read_jsonl
from rsearch.runtime.metrics import read_metrics
from rsearch.runtime.workdir import Workdir
from tests.models.tiny_bert import write_tiny_bert
from tests.rollout import tiny

CHAT = [{"role": "user", "content": "Who?"}]
DIM = 32
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
WORDS = ["river", "city", "harbour", "tower", "bridge", "museum", "garden", "lake"]
ARGUMENTS = [
    "--config.rl.lr=1e-6",
    "--config.rl.steps=30",
    "--config.stages=('sft', 'rl')",
    "--config.reward={'answer_em': {}}",
    "--config.retrieval.top_k=3",
    "--config.model.width=32",
    "--config.rollout.temperature=1.0",
    "--config.protocol.name=search_r1",
    "--config.checkpoint.keep=2",
    "--config.data.train=",
]


def _texts(count):
    return [f"{WORDS[i % 8]} {i}\nIt is a {WORDS[i * 3 % 8]}." for i in range(count)]


def _write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_weights(folder, **settings):
    spec = tiny.spec(max_context=512)
    params = tiny.params(max_context=512)
    huggingface.export(folder / "model", params, spec, tiny.tokenizer(), **settings)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)


def load_weights(folder):
    spec = read_spec(folder / "model")
    huggingface.load_params(folder / "model", spec)
    tokenizer = load_tokenizer(folder / "model")
    tokenizer.encode_prompt(CHAT)
    tokenizer.role_frame("observation")


def make_bert(folder):
    (folder / "bert").mkdir()
    write_tiny_bert(folder / "bert")
    told = {"max_seq_length": 16, "do_lower_case": False}
    (folder / "bert" / "sentence_bert_config.json").write_text(json.dumps(told))


def load_bert(folder):
    load_encoder(folder / "bert", family="minilm").encode_queries(["the city"])


def make_corpus(folder):
    rows = [{"id": f"p{i}", "contents": text} for i, text in enumerate(_texts(40))]
    _write_lines(folder / "corpus.jsonl", rows)
    load_corpus(folder)  # the offsets are a file, too


def make_packed_corpus(folder):
    rows = [
        {"id": i, "title": text.partition("\n")[0], "text": "a"}
        for i, text in enumerate(_texts(40))
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(text.encode()))


def load_corpus(folder):
    (path,) = [*folder.glob("corpus.jsonl"), *folder.glob("corpus.jsonl.gz")] or [
        folder / "corpus.jsonl"
    ]
    with Corpus(path) as corpus:
        assert len(list(corpus)) == len(corpus)


def make_index(folder):
    make_corpus(folder)
    with Corpus(folder / "corpus.jsonl") as corpus:
        encoder = HashedNgrams(DIM)
        build_index(corpus, encoder, folder / "index", kind="partitioned")


def load_index(folder):
    encoder = HashedNgrams(DIM)
    with Corpus(folder / "corpus.jsonl") as corpus:
        index = open_index(folder / "index", corpus=corpus, encoder=encoder)
        index.nearest.search(encoder.encode_queries(["river 3"]), 3)


def make_questions(folder):
    rows = [
        {"id": f"q{i}", "question": f"Who built it {i}?", "golden_answers": ["Ann"]}
        for i in range(20)
    ]
    _write_lines(folder / "flashrag.jsonl", rows)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Question: Who {i}?"}],
            "reward_model": {"ground_truth": {"target": ["Ann"]}},
            "extra_info": {"index": i, "split": "train"},
            "data_source": "nq",
        }
        for i in range(20)
    ]
    _write_lines(folder / "verl.jsonl", rows)
    rows = [{"idx": i, "question": f"Who {i}?", "answer": "Ann"} for i in range(9)]
    (folder / "list.json").write_text(json.dumps(rows))


def load_questions_of(folder):
    for name in ("flashrag.jsonl", "verl.jsonl", "list.json"):
        load_questions(folder / name)


def _tree():
    return {
        "params": {"w": jnp.arange(12, dtype=jnp.float32).reshape(3, 4)},
        "step": jnp.int32(3),
    }


def make_checkpoint(folder):
    for step in (1, 2):
        checkpoint.save(folder / "checkpoints", step, _tree(), {"a": 1}, keep=2)


def load_checkpoint(folder):
    like = jax.eval_shape(_tree)
    actual = checkpoint.newest_good(folder / "checkpoints", like)
    if actual is not None:  # what comes back is what was saved, or nothing
        jax.tree.map(np.testing.assert_array_equal, actual[1], _tree())


def _run_config():
    return load("configs/quickstart.py")


def make_run(folder):
    with Workdir(folder / "run", _run_config(), inputs={"train": "abc"}) as run:
        rl = run.stage("rl")
    rows = [{"step": i, "reward": 0.5, "seconds": 1.0} for i in range(5)]
    _write_lines(rl / "metrics.jsonl", rows)
    key = {"stage": "rl", "method": "protocol", "dataset": "dev"}
    results = [{**key, "n": 4, "em": 50.0}]
    (folder / "run" / "results.json").write_text(json.dumps(results))
    _write_lines(folder / "run" / "transcripts.jsonl", [{**key, "id": "q", "n": 1}])


def load_run(folder):
    with Workdir(folder / "run", _run_config(), inputs={"train": "abc"}) as run:
        read_metrics(run.path / "rl" / "metrics.jsonl")
    read_results(folder / "run")
    if (folder / "run" / "transcripts.jsonl").exists():
        read_jsonl(folder / "run" / "transcripts.jsonl")


def make_arguments(folder):
    (folder / "arguments.json").write_text(json.dumps(ARGUMENTS))


def load_arguments(folder):
    """An override is text, whatever it says; what is no text never gets here."""
    path = folder / "arguments.json"
    words = (
        path.read_bytes().decode("utf-8", "surrogateescape") if path.is_file() else ""
    )
    try:
        words = json.loads(words)
    except (ValueError, RecursionError):
        words = words[:10_000].split(",")
    words = words if isinstance(words, list) else [words]
    words = [word if isinstance(word, str) else f"--config.rl={word}" for word in words]
    words = [word for word in words if not word.startswith(("-h", "--help"))]
    config, _ = parse_command_line(["--config=configs/quickstart.py", *words], flags={})
    validate(config)


KINDS = {
    "weights": (make_weights, load_weights),
    "shards": (lambda f: make_weights(f, max_shard_bytes=20_000), load_weights),
    "encoder": (make_bert, load_bert),
    "index": (make_index, load_index),
    "corpus": (make_corpus, load_corpus),
    "packed corpus": (make_packed_corpus, load_corpus),
    "questions": (make_questions, load_questions_of),
    "checkpoint": (make_checkpoint, load_checkpoint),
    "run": (make_run, load_run),
    "arguments": (make_arguments, load_arguments),
}


def make(root: pathlib.Path) -> None:
    """A folder below `root` with a sample of each kind, where there is none yet."""
    for kind, (make_one, _) in KINDS.items():
        folder, part = root / kind, root / f"{kind}.part"
        if not folder.exists():
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            make_one(part)
            part.rename(folder)
