"""What the retrieval benchmarks search: real passages, and many made from them."""

import dataclasses
import json
import pathlib

import numpy as np

from rsearch.bench.children import alone
from rsearch.data.corpus import Corpus
from rsearch.data.questions import load_questions
from rsearch.models.hf.directory import find_model
from rsearch.retrieval.encoder import fingerprint_of, load_encoder
from rsearch.retrieval.engine import PassageList
from rsearch.retrieval.index import corpus_path, open_index, read_index_manifest
from rsearch.retrieval.nearest import exact_scores
from rsearch.retrieval.vectors import Vectors
from rsearch.runtime import files
from rsearch.runtime.console import note
from rsearch.types import Passage
from rsearch.world.world import make_world

TOP_K = 10  # neighbours that recall counts
MADE_FROM = "made_from.json"  # in a folder of vectors, whose settings it tells
MADE_AT_ONCE = 50_000  # rows of noise
WORLD = {
    **dict(people=400, films=300, companies=60, cities=60, train_questions=1400),
    **dict(dev_questions=200, kinds=("single", "bridge"), known_share=0.0),
    **dict(missing_share=0.0, distractors=0),
}


@dataclasses.dataclass(frozen=True)
class Searched:
    """Vectors on disk, with queries and what an exact search finds.

    Attributes:
        folder: holds vectors.npy [N, D], queries.npy [n, D] and exact.npy [n, TOP_K],
            the scores of the exactly nearest.
        num, dim: N and D.
    """

    folder: pathlib.Path
    num: int
    dim: int


def real_passages(
    work, *, corpus, encoder, family, index, questions, num_queries
) -> Searched:
    """Real passages and queries, encoded in a process of their own.

    Args:
        work: directory; what it holds already is taken as it is.
        corpus: file of passages; "" is the embedded world's.
        encoder, family: see `load_encoder`.
        index: of rsearch.index, over the corpus, whose vectors are taken; "" encodes.
            Like the encoder it is known by what it holds, wherever it is.
        questions: a file of queries, the first ones; titles of passages follow.
        num_queries: that are wanted; less where there are fewer passages.

    Raises:
        ValueError: what the directory holds is of other settings.

    Returns:
        The Searched; `texts.json` beside the vectors holds the queries' texts and, as
        lists of id and contents, the passages.
    """
    folder = work / "real"
    files_of = {"corpus": corpus, "questions": questions}
    made_from = {"encoder": encoder, "family": family, "index": index}
    if encoder != "hashed":
        made_from["encoder"] = fingerprint_of(find_model(encoder), [])
    if index:
        made_from["index"] = read_index_manifest(pathlib.Path(index))["digest"]
    made_from |= {
        n: f and files.digest_file(pathlib.Path(f)) for n, f in files_of.items()
    }
    made_from["queries"] = num_queries
    if not _is_made(folder, made_from):
        given = (corpus, encoder, family, index, questions, num_queries)
        alone(_encode, work, folder, *given)
        _tell_made_from(folder, made_from)
    return _read(folder)


def _is_made(folder, wanted) -> bool:
    """Whether the folder holds vectors made from these things, all of them.

    Raises:
        ValueError: it holds others, or such that nobody tells what they were made from.
    """
    path = folder / MADE_FROM
    if not path.exists():
        if (folder / "exact.npy").exists():
            raise ValueError(
                f"{folder}: has no {MADE_FROM} to tell what its vectors were made "
                "from; name another --work, or remove it"
            )
        return False
    found = files.read_json(path)
    wrong = [name for name in wanted if found.get(name) != wanted[name]]
    if wrong:
        raise ValueError(
            f"{folder}: made with another --{', --'.join(wrong)}; name another "
            "--work, or remove it"
        )
    return True


def _tell_made_from(folder, made_from):
    """Written last: where this is, the folder is whole."""
    files.replace(folder / MADE_FROM, json.dumps(made_from).encode())


def _encode(work, folder, corpus, encoder, family, index, questions, num_queries):
    """Writes what `real_passages` returns."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = load_encoder(encoder, family=family or None)
    passages, vectors, asked = _passages(work, corpus, encoded, index, questions)
    rng = np.random.default_rng(0)
    drawn = rng.choice(len(passages), min(num_queries, len(passages)), False)
    titles = (passages[i].title.strip('" ') for i in drawn)
    texts = list(dict.fromkeys(t for t in [*asked, *titles] if t.strip()))
    texts = texts[:num_queries]
    told = {"texts": texts, "passages": [[p.id, p.contents] for p in passages]}
    (folder / "texts.json").write_text(json.dumps(told))
    _write(folder, vectors, encoded.encode_queries(texts))


def _passages(work, corpus, encoder, index, questions):
    """(passages, their vectors, texts of the questions)."""
    asked = [q.text for q in load_questions(questions)[0]] if questions else []
    if not corpus and not index:
        world = make_world(seed=0, **WORLD)
        passages = world.passages
        asked = asked or [q.text for q in world.train]
    else:
        with Corpus(corpus or corpus_path(index), cache=work) as opened:
            passages = list(opened)
            if index:
                own = open_index(index, corpus=opened, encoder=encoder)
                return passages, own.nearest.vectors.array(), asked
    note(f"encoding {len(passages)} passages")
    texts = [passage.contents for passage in passages]
    return passages, encoder.encode_passages(texts), asked


def many_vectors(work, real: Searched, *, num, noise) -> Searched:
    """As many vectors as wanted: real ones, each with noise of its own, at length 1.

    Args:
        work: directory; what it holds already is taken as it is.
        real: whose vectors and queries these are.
        num: vectors to make.
        noise: length of what is added to a vector of length 1.

    Raises:
        ValueError: what the directory holds is of other settings of the real ones.
    """
    folder = work / f"made-{num}-{noise}"
    made_from = files.read_json(real.folder / MADE_FROM)
    if not _is_made(folder, made_from):
        note(f"making {num} vectors")
        folder.mkdir(parents=True, exist_ok=True)
        base = np.load(real.folder / "vectors.npy")
        made = np.empty((num, real.dim), np.float32)
        rng = np.random.default_rng(0)
        for start in range(0, num, MADE_AT_ONCE):
            part = np.arange(start, min(start + MADE_AT_ONCE, num)) % len(base)
            drawn = rng.standard_normal((len(part), real.dim), np.float32)
            rows = base[part] + noise / np.sqrt(real.dim) * drawn
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            made[start : start + len(part)] = rows
        _write(folder, made, np.load(real.folder / "queries.npy"))
        _tell_made_from(folder, made_from)
    return _read(folder)


def _write(folder, vectors, queries):
    vectors = np.asarray(vectors, np.float32)
    np.save(folder / "vectors.npy", vectors)
    np.save(folder / "queries.npy", queries)
    exact = exact_scores(Vectors([vectors]), queries, TOP_K)
    np.save(folder / "exact.npy", exact)


def _read(folder):
    shape = np.load(folder / "vectors.npy", mmap_mode="r").shape
    return Searched(folder, *shape)


def read_texts(folder):
    """(the queries' texts, the passages) of `real_passages`."""
    told = json.loads((pathlib.Path(folder) / "texts.json").read_text())
    passages = [Passage(name, contents) for name, contents in told["passages"]]
    return told["texts"], PassageList(passages)
