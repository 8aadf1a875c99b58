"""Make a small sample of each kind of input file, and read it as rsearch does."""

import gzip
import json
import pathlib
import shutil
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rsearch.config.recipes import load, parse_command_line, validate
from rsearch.data.corpus import Corpus
from rsearch.data.corpus_sources import write_corpus
from rsearch.data.demonstrations import load_demonstrations
from rsearch.data.questions import load_questions
from rsearch.evaluation.results import read_results, read_transcripts
from rsearch.evaluation.runs import read_run
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.hf.families import read_spec
from rsearch.models.tokenizer import load_tokenizer
from rsearch.retrieval.bm25 import open_bm25
from rsearch.retrieval.encoder import HashedNgrams, load_encoder
from rsearch.retrieval.engine import SearchEngine
from rsearch.retrieval.index import open_index
from rsearch.retrieval.index_build import build_bm25, build_index
from rsearch.retrieval.vector_files import VectorFile
from rsearch.runtime import checkpoint
from rsearch.runtime.identity import record_start
from rsearch.runtime.journal import AppendLog
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
MODULES = "sentence_transformers.models"
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


def make_sentence_encoder(folder):
    """Write an encoder in the layout of sentence-transformers."""
    make_bert(folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{MODULES}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{MODULES}.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{MODULES}.Normalize"},
    ]
    (folder / "bert" / "modules.json").write_text(json.dumps(modules))
    (folder / "bert" / "1_Pooling").mkdir()
    width = json.loads((folder / "bert" / "config.json").read_text())["hidden_size"]
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    (folder / "bert" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    settings = {"prompts": {}, "similarity_fn_name": "cosine"}
    path = folder / "bert" / "config_sentence_transformers.json"
    path.write_text(json.dumps(settings))


def make_tokenizer(folder):
    """Write a tokenizer with some tokens and templates outside tokenizer.json."""
    tiny.tokenizer().save(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["chat_template"] = [{"name": "default", "template": TEMPLATE}]
    path.write_text(json.dumps(settings))
    names = {"eos_token": settings["eos_token"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    added = {token["content"]: token["id"] for token in tokens}
    (folder / "added_tokens.json").write_text(json.dumps(added))


def load_tokenizer_of(folder):
    tokenizer = load_tokenizer(folder)
    tokenizer.encode_prompt(CHAT)
    tokenizer.encode("river and harbour")


def load_bert(folder):
    load_encoder(folder / "bert", family="minilm").encode_queries(["the city"])


def make_corpus(folder):
    rows = [{"id": f"p{i}", "contents": text} for i, text in enumerate(_texts(40))]
    _write_lines(folder / "corpus.jsonl", rows)
    load_corpus(folder)  # writes the file of offsets, which is damaged as well


def make_packed_corpus(folder):
    rows = [
        {"id": i, "title": text.partition("\n")[0], "text": "a"}
        for i, text in enumerate(_texts(40))
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(text.encode()))


def make_layouts(folder):
    """Write questions and corpora in the layouts of public datasets."""
    musique = {"id": "2hop__1", "question": "Who?", "answer": "Ann"}
    musique |= {"answer_aliases": ["A. B."], "answerable": True, "paragraphs": []}
    _write_lines(folder / "musique.jsonl", [musique])
    popqa = {"id": 4, "question": "Who?", "possible_answers": '["Ann", "A."]'}
    _write_lines(folder / "popqa.jsonl", [popqa])
    answer = {"value": "Ann", "aliases": ["A. B."], "normalized_aliases": ["a b"]}
    trivia = {"question_id": "tc_2", "question": "Who?", "answer": answer}
    _write_lines(folder / "triviaqa.jsonl", [trivia])
    rows = [{"question": f"Who {i}?", "golden_answers": ["Ann"]} for i in range(20)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "questions.parquet", row_group_size=7)
    beir = [{"_id": f"d{i}", "title": "", "text": t} for i, t in enumerate(_texts(9))]
    _write_lines(folder / "corpus.jsonl", beir)


def load_layouts(folder):
    for name in ("musique.jsonl", "popqa.jsonl", "triviaqa.jsonl", "questions.parquet"):
        load_questions(folder / name)
    load_corpus(folder)


def make_demonstrations(folder):
    rows = [
        {
            "id": f"d{i}",
            "question": "Who?",
            "turns": ["<search> it </search>", "<answer> Ann </answer>"],
            "observations": ["Ann built it."],
        }
        for i in range(9)
    ]
    _write_lines(folder / "demonstrations.jsonl", rows)


def load_demonstrations_of(folder):
    load_demonstrations(folder / "demonstrations.jsonl")


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


def make_bm25(folder):
    make_corpus(folder)
    with Corpus(folder / "corpus.jsonl") as corpus:
        build_bm25(corpus, folder / "index")


def load_bm25(folder):
    with Corpus(folder / "corpus.jsonl") as corpus:
        index, manifest = open_bm25(folder / "index", corpus=corpus)
        engine = SearchEngine(
            index, None, corpus, top_k=3, fingerprint=manifest["digest"]
        )
        engine(["river 3"])


def make_vectors(folder):
    """Write a corpus's vectors in each layout from which an index can be built."""
    make_corpus(folder)
    with Corpus(folder / "corpus.jsonl") as corpus:
        ids = [passage.id for passage in corpus]
        rows = HashedNgrams(DIM).encode_passages([p.contents for p in corpus])
    np.save(folder / "vectors.npy", rows)
    head = struct.pack("<4siqqq?iQ", b"IxFI", DIM, len(ids), 0, 0, True, 0, rows.size)
    (folder / "vectors.faiss").write_bytes(head + rows.tobytes())
    table = pa.table({"id": ids, "vector": rows.tolist()})
    pq.write_table(table, folder / "vectors.parquet", row_group_size=15)


def load_vectors(folder):
    with Corpus(folder / "corpus.jsonl") as corpus:
        for name in ("vectors.npy", "vectors.faiss", "vectors.parquet"):
            vectors = VectorFile(folder / name)
            vectors.check_fits(corpus, HashedNgrams(DIM))
            vectors.rows(corpus, 0, len(corpus))


def make_tables(folder):
    """Write corpora in the layouts that rsearch converts."""
    rows = [text.split("\n") for text in _texts(20)]
    lines = [f'{i}\t"{text}"\t{title}\n' for i, (title, text) in enumerate(rows)]
    (folder / "dpr.tsv").write_text("id\ttext\ttitle\n" + "".join(lines))
    lines = [f"{i}\tTitle: {a} Text: {b}\n" for i, (a, b) in enumerate(rows)]
    (folder / "numbered.tsv").write_text("".join(lines))
    pages = [{"_id": a, "wikipedia_title": a, "text": [a, b]} for a, b in rows]
    _write_lines(folder / "pages.jsonl", pages)


def load_tables(folder):
    for name, words in (("dpr.tsv", 0), ("numbered.tsv", 0), ("pages.jsonl", 4)):
        out = folder / f"{name}.out"
        write_corpus([str(folder / name)], out, words=words)
        out.unlink()


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
    if actual is not None:  # either exactly what was saved, or nothing
        jax.tree.map(np.testing.assert_array_equal, actual[1], _tree())


def _run_config():
    return load("configs/quickstart.py")


def make_run(folder):
    with Workdir(folder / "run", _run_config(), inputs={"train": "abc"}) as run:
        rl = run.stage("rl")
        record_start(run.path, "train", _run_config(), inputs={"train": "abc"})
    journal = AppendLog(rl, "rollouts")
    for number in range(4):
        journal.add(["key", number], b"body" * number)
    undone = [{"step": 1, "reward": 0.5, "roll_back": 1}]
    _write_lines(rl / "rolled_back.jsonl", undone)
    rows = [{"step": i, "reward": 0.5, "seconds": 1.0} for i in range(5)]
    _write_lines(rl / "metrics.jsonl", rows)
    key = {"stage": "rl", "method": "protocol", "dataset": "dev"}
    results = [{**key, "n": 4, "em": 50.0}]
    (folder / "run" / "results.json").write_text(json.dumps(results))
    segments = [{"source": "policy", "text": "<answer> Ann </answer>"}]
    row = {**key, "id": "q", "question": "Who?", "segments": segments}
    _write_lines(folder / "run" / "transcripts.jsonl", [row])


def load_run(folder):
    with Workdir(folder / "run", _run_config(), inputs={"train": "abc"}) as run:
        record_start(run.path, "train", _run_config(), inputs={"train": "abc"})
        read_metrics(run.path / "rl" / "metrics.jsonl")
        journal = AppendLog(run.path / "rl", "rollouts")
        for number in range(4):  # either exactly what was written, or nothing
            assert journal.get(["key", number]) in (None, b"body" * number)
    read_run(folder / "run")
    read_results(folder / "run")
    if (folder / "run" / "transcripts.jsonl").exists():
        read_transcripts(folder / "run")


def make_arguments(folder):
    (folder / "arguments.json").write_text(json.dumps(ARGUMENTS))


def load_arguments(folder):
    """Parse the file's words as overrides, turned into text as on a command line."""
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
    "sentence encoder": (make_sentence_encoder, load_bert),
    "tokenizer": (make_tokenizer, load_tokenizer_of),
    "layouts": (make_layouts, load_layouts),
    "demonstrations": (make_demonstrations, load_demonstrations_of),
    "index": (make_index, load_index),
    "words": (make_bm25, load_bm25),
    "vectors": (make_vectors, load_vectors),
    "corpus": (make_corpus, load_corpus),
    "tables": (make_tables, load_tables),
    "packed corpus": (make_packed_corpus, load_corpus),
    "questions": (make_questions, load_questions_of),
    "checkpoint": (make_checkpoint, load_checkpoint),
    "run": (make_run, load_run),
    "arguments": (make_arguments, load_arguments),
}


def make(root: pathlib.Path) -> None:
    """Make a folder with a sample of each kind below `root`, unless it exists."""
    for kind, (make_one, _) in KINDS.items():
        folder, part = root / kind, root / f"{kind}.part"
        if not folder.exists():
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            make_one(part)
            part.rename(folder)
