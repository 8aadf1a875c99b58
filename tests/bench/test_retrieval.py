"""The retrieval benchmarks: what they compare, on data small enough to check."""

import importlib
import io
import itertools
import json
import os
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from rsearch.bench import child, neighbours, retrieval
from rsearch.bench.child import Unmeasured
from rsearch.bench.comparison import OURS, Bench
from rsearch.bench.machine import MachineBounds
from rsearch.bench.neighbours import VectorSet, many_vectors, real_passages
from rsearch.index import main as build_index
from rsearch.retrieval.encoder import load_encoder
from tests.models.tiny_bert import write_tiny_bert

MACHINE = MachineBounds(
    "m", 2, flops={"float32": 1e15}, bandwidth=1e14, is_measured=True
)
REAL = {"corpus": "", "encoder": "hashed", "family": "", "index": "", "questions": ""}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Let every repetition search only once."""
    monkeypatch.setattr(neighbours, "MIN_SECONDS", 0.0)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Return a folder with vectors of the embedded world's passages, and queries."""
    work = tmp_path_factory.mktemp("work")
    real_passages(work, **REAL, num_queries=40)
    return work


@pytest.fixture
def made_here(monkeypatch):
    """Let vectors be made in this process."""
    monkeypatch.setattr(
        neighbours, "run_in_process", lambda function, *args: function(*args)
    )


def in_this_process(subjects, repeats, **_):
    """Measure subjects in this process; a peer that is not installed has no numbers."""
    actual = {}
    for name, subject in subjects.items():
        module = importlib.import_module(subject.module)
        try:
            once = getattr(module, subject.make)(**subject.settings)
            actual[name] = [once() | {"peak_bytes": 1} for _ in range(repeats)]
        except ModuleNotFoundError as error:
            assert name != OURS
            actual[name] = f"{error.name} is not installed"
    return actual


@pytest.mark.slow
def test_searchers_are_compared_at_the_requested_recall(work, monkeypatch):
    monkeypatch.setattr(retrieval, "compare", in_this_process)
    rows = retrieval.measure(
        lambda: Bench(MACHINE, 2),
        **REAL,
        cases="real,made",
        queries=40,
        batch=16,
        recall=0.9,
        vectors=1200,
        noise=0.5,
        rollouts=4,
        work=str(work),
    )
    cases = {row.case for row in rows}
    assert {"made vectors, 1,200 x 512"} < cases
    for case in [case for case in cases if "computed" not in case]:
        named = {row.subject: row for row in rows if row.case == case}
        assert {*named} == {*retrieval.SEARCHERS}
        ours = named.pop(OURS)
        assert ours.counts["recall"] >= 0.9 and ours.bound == "bytes"
        for row in named.values():
            is_told = row.value and row.counts["recall"] >= 0.9
            assert is_told or row.missing == "faiss is not installed"


def test_if_scann_misses_the_recall_its_peers_are_still_reported(tmp_path, monkeypatch):
    run = {"queries": 8, "seconds": 2.0, "peak_bytes": 1, "recall": 1.0}
    names = ("build seconds", "load seconds", "searched", "reordered")
    run |= dict.fromkeys(names, 1)
    run |= {"dimensions of a code": 4, "bytes of a compared feature": 4}

    def compare(subjects, _):
        return {n: "no recall of 1" if n == OURS else [run] for n in subjects}

    monkeypatch.setattr(retrieval, "compare", compare)
    vectors = VectorSet(tmp_path, 6000, 384)
    ours, *peers = retrieval.measure_searchers(Bench(MACHINE), "real", vectors, 4, 1.0)
    assert ours.missing == "no recall of 1"
    assert [(row.value, row.ratio) for row in peers] == [(4.0, None)] * 3


def test_the_server_is_not_measured_with_the_encoder_that_hashes_words(
    work, monkeypatch
):
    monkeypatch.setattr(retrieval, "compare", in_this_process)
    given = {name: default for name, (default, _) in retrieval.FLAGS.items()}
    given |= {"cases": "rollouts", "rollouts": 8, "queries": 40, "work": str(work)}
    given |= {"family": REAL["family"]}  # as for the vectors in that folder
    rows = retrieval.measure(lambda: Bench(MACHINE, 1), **given)
    missing = {row.subject for row in rows if "hashes words" in row.missing}
    assert missing == {retrieval.AT_ONCE, retrieval.IN_TURN}
    assert all(row.value for row in rows if row.subject not in missing)


def test_stored_vectors_of_other_settings_are_refused(work):
    with pytest.raises(ValueError, match="made with another --queries; name another"):
        real_passages(work, **REAL, num_queries=41)


def test_vectors_made_from_other_real_ones_are_refused(tmp_path, made_here):
    real = real_passages(tmp_path, **REAL, num_queries=6)
    many_vectors(tmp_path, real, num=20, noise=0.5)
    shutil.rmtree(tmp_path / "real")
    other = real_passages(tmp_path, **REAL, num_queries=5)
    with pytest.raises(ValueError, match=r"made-20-0\.5: made with another --queries;"):
        many_vectors(tmp_path, other, num=20, noise=0.5)


@pytest.mark.parametrize("folder", ["real", "made-20-0.5"])
def test_vectors_without_a_record_of_their_settings_are_refused(
    folder, tmp_path, made_here
):

    def both():
        real = real_passages(tmp_path, **REAL, num_queries=6)
        return many_vectors(tmp_path, real, num=20, noise=0.5)

    assert both() == both()
    (tmp_path / folder / "made_from.json").unlink()
    with pytest.raises(ValueError, match=rf"{folder}: has no made_from\.json to tell"):
        both()


@pytest.mark.parametrize("is_made", [False, True])
def test_a_failed_run_leaves_a_directory_that_other_settings_can_use(
    is_made, tmp_path, monkeypatch, made_here
):
    exact_scores = neighbours.exact_scores

    def both(num_queries):
        real = real_passages(tmp_path, **REAL, num_queries=num_queries)
        return many_vectors(tmp_path, real, num=20, noise=0.5)

    def fail(vectors, *given):
        if is_made == (len(vectors) == 20):
            raise OSError("no room")
        return exact_scores(vectors, *given)

    monkeypatch.setattr(neighbours, "exact_scores", fail)
    with pytest.raises(OSError, match="no room"):
        both(6)
    monkeypatch.setattr(neighbours, "exact_scores", exact_scores)
    if is_made:
        shutil.rmtree(tmp_path / "real")
    made = both(5)
    assert len(np.load(made.folder / "queries.npy")) == 5


def test_an_encoder_and_an_index_are_identified_by_their_contents(
    tmp_path, monkeypatch, made_here
):
    monkeypatch.setattr(neighbours, "_encode", lambda *_: (tmp_path / "real").mkdir())
    monkeypatch.setattr(neighbours, "_read_vector_set", lambda folder: folder)
    digests = {"one": 1, "moved": 1, "other": 2}
    manifest = lambda path: {"digest": digests[path.name]}  # noqa: E731
    monkeypatch.setattr(neighbours, "read_index_manifest", manifest)

    def made(encoder="bert", index="one"):
        given = {"encoder": str(tmp_path / encoder), "index": index}
        return real_passages(tmp_path, **REAL | given, num_queries=6)

    write_tiny_bert(tmp_path / "bert")
    assert made() == made(index="moved")
    with pytest.raises(ValueError, match="made with another --index;"):
        made(index="other")
    (tmp_path / "bert").rename(tmp_path / "elsewhere")
    assert made("elsewhere")
    write_tiny_bert(tmp_path / "bert", seed=1)
    with pytest.raises(ValueError, match="made with another --encoder;"):
        made()


def test_vectors_are_taken_from_an_index_in_several_parts(tmp_path, made_here):
    lines = [{"id": str(i), "contents": f"t{i}\nthe city {i}"} for i in range(12)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    out = tmp_path / "index"
    flags = [f"--corpus={corpus}", f"--out={out}", "--encoder=hashed", "--parts=2"]
    assert build_index([*flags, "--shard_size=5"]) == 0
    real = real_passages(tmp_path, **REAL | {"index": str(out)}, num_queries=6)
    texts = [line["contents"] for line in lines]
    expected = load_encoder("hashed", family=None).encode_passages(texts)
    np.testing.assert_array_equal(np.load(real.folder / "vectors.npy"), expected)


def test_made_vectors_are_real_ones_plus_noise_of_the_given_length(work):
    real = real_passages(work, **REAL, num_queries=40)
    made = many_vectors(work, real, num=3 * real.num, noise=0.5)
    base, rows = (np.load(s.folder / "vectors.npy") for s in (real, made))
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    # Noise that is nearly orthogonal to the vector: cos = 1 / sqrt(1 + 0.5^2).
    cosines = (rows.reshape(3, real.num, -1) * base).sum(-1)
    assert np.abs(cosines.mean() - 0.8944) < 2e-3
    queries, exact = (np.load(made.folder / f"{n}.npy") for n in ("queries", "exact"))
    expected = -np.sort(-(queries @ rows.T), axis=1)[:, :10]
    np.testing.assert_allclose(exact, expected, atol=1e-5)


def test_the_fastest_setting_with_enough_recall_is_chosen(tmp_path, monkeypatch):
    queries = np.eye(8, dtype=np.float32)
    exact = np.ones((8, 10), np.float32)
    np.save(tmp_path / "queries.npy", queries)
    np.save(tmp_path / "exact.npy", exact)
    calls, clock = [], [0.0]
    told_time = SimpleNamespace(perf_counter=lambda: clock[0])
    monkeypatch.setattr(neighbours, "time", told_time)

    def search(first, second):
        def find(part):
            calls.append((first, second))
            # `first` of the ten are found, so that 9 suffice; `second` costs time.
            clock[0] += 0.001 * second
            return np.where(np.arange(10) < first, 1.0, 0.0) * np.ones((len(part), 1))

        return find

    # An index that is the same but slower, and one that finds nothing.
    other = neighbours.OpenIndex(lambda a, _: search(a, 3), (3, 9, 10), dims_per_code=5)
    empty = neighbours.OpenIndex(lambda *_: search(0, 0), (0,))
    index = neighbours.OpenIndex(search, (3, 9, 10), (1, 30), 7.0, 2.0, dims_per_code=4)
    once = neighbours.tune(tmp_path, [other, index, empty], 4, 0.9)
    told = once()
    assert (told["searched"], told["reordered"]) == (9, 1)
    assert told["recall"] == pytest.approx(0.9) and told["queries"] == 8
    assert (told["build seconds"], told["load seconds"]) == (7.0, 2.0)
    assert told["dimensions of a code"] == 4
    assert 1e6 < told["peak_bytes"] == pytest.approx(child.peak_bytes(), rel=0.1)
    assert not {(10, 1), (9, 30), (10, 30)} & set(calls)  # slower than what suffices
    calls.clear()
    monkeypatch.setattr(neighbours, "MIN_SECONDS", 0.1)
    assert once()["seconds"] == pytest.approx(0.002)
    assert len(calls) == pytest.approx(100, abs=2)  # all queries, repeatedly
    with pytest.raises(Unmeasured, match=r"^no setting has a recall of 1\.1$"):
        neighbours.tune(tmp_path, [other, empty], 4, 1.1)


def write(path, text):
    """Write a text and the process's id, in place of building an index."""
    path.write_text(f"{text} {os.getpid()}")


def test_an_index_is_built_once_in_another_process_and_its_time_is_kept(tmp_path):
    path = tmp_path / "index"
    first = neighbours.build_once(path, write, "built")
    text, pid = path.read_text().split()
    assert text == "built" and int(pid) != os.getpid() and first > 0
    assert neighbours.build_once(path, write, "again") == first
    assert path.read_text() == f"built {pid}"
    with pytest.raises(FileNotFoundError, match="missing/index"):
        neighbours.build_once(tmp_path / "missing" / "index", write, "built")


def test_the_least_work_is_what_no_search_can_avoid(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)  # each core takes 128 of 256 queries
    searched = VectorSet(tmp_path, 1_000_000, 384)
    flat = retrieval.least_work("faiss Flat", searched, 256, {})
    assert flat == (768_000_000, 6_000_000)
    sizes = {"dimensions of a code": 2, "bytes of a compared feature": 4}
    told = {"searched": 44, "reordered": 100, **sizes}
    # 2000 centroids of 384 bytes; a million codes of 96 bytes, except those in leaves
    # that none of the 128 queries drew among its 44; 100 vectors for each query.
    ours = retrieval.least_work(OURS, searched, 256, told)
    drawn = 1 - (1956 / 2000) ** 128
    shared = 768_000 + drawn * 96e6
    assert ours[1] == pytest.approx(shared / 128 + 100 * 1536)
    assert ours[0] == 2 * (2000 + 16 + 100) * 384
    # Coarser codes of half the size, and vectors of a quarter of the size.
    sizes = {"dimensions of a code": 4, "bytes of a compared feature": 1}
    ours = retrieval.least_work(OURS, searched, 256, told | sizes)
    shared = 768_000 + drawn * 48e6
    assert ours[1] == pytest.approx(shared / 128 + 100 * 384)
    # No centroids, 6000 codes of 48 bytes for four queries, 50 vectors in int8.
    few = VectorSet(tmp_path, 6000, 384)
    ours = retrieval.least_work(
        OURS, few, 256, {"searched": 1, "reordered": 50, **sizes}
    )
    assert ours == (2 * 66 * 384, 6000 * 48 / 4 + 50 * 384)
    assert retrieval.least_work("faiss HNSW32", searched, 256, told) is None


def test_memory_of_the_largest_corpus_equals_arithmetic_by_hand():
    rows = {row.subject.rpartition("=")[2]: row for row in retrieval.large_rows()}
    # Codes of 256 bytes and 4, 2 or 1 bytes for each of 1024 features; the rest is
    # small.
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("int8", 1)):
        expected = 29e6 * (256 + 1024 * size) / 1e9
        assert rows[dtype].value == pytest.approx(expected, rel=2e-3)
        of_a_host = rows[dtype].counts["GB of each of 8 hosts"]
        assert of_a_host == pytest.approx(expected / 8, rel=2e-3)


def test_queries_of_a_turn_are_new_and_the_given_share_is_equal_within_groups():
    texts = [f"t{i}" for i in range(40)]
    alone = [retrieval.queries_of(texts, turn, 16, 0.0) for turn in range(5)]
    assert len({query for turn in alone for query in turn}) == 80
    half = retrieval.queries_of(texts, 0, 16, 0.5)
    assert len(set(half)) == 2 * 5
    assert half[:4] == ["t0"] * 4 and half[4:8] == ["t4", "t5", "t6", "t7"]


def test_memory_of_searching_is_the_sum_over_its_processes(monkeypatch, tmp_path):
    held, forgotten = {"self": 3, 17: 40}, []
    monkeypatch.setattr(retrieval, "reset_peak", forgotten.append)
    monkeypatch.setattr(retrieval, "peak_bytes", held.get)
    encoding = {"encoder": "hashed", "family": ""}
    settings = {"folder": tmp_path, "num_rollouts": 8, "same_share": 0.0, **encoding}
    texts = {"texts": ["a"], "passages": [["p", "t\na"]]}
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    np.save(tmp_path / "vectors.npy", np.eye(1, 512, dtype=np.float32))
    assert retrieval.make_engine(**settings)()["peak_bytes"] == 3
    assert forgotten == ["self"]
    server = SimpleNamespace(pid=17, stdout=io.StringIO('{"url": "http://here"}'))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: server)
    hits = {"result": [[{"document": {"id": "p"}}]]}
    reply = SimpleNamespace(raise_for_status=lambda: None, json=lambda: hits)
    client = SimpleNamespace(post=lambda *_, **__: reply)
    monkeypatch.setattr(retrieval.httpx, "Client", lambda **_: client)
    served = retrieval.make_served(**settings, at_once=True)
    assert served()["peak_bytes"] == 43 and forgotten == ["self", "self", 17]


@pytest.mark.parametrize("family", ["minilm", "declared"])
def test_a_server_that_cannot_serve_reports_why(family, tmp_path, capfd):
    (tmp_path / "texts.json").write_text('{"texts": ["a"], "passages": []}')
    settings = {"folder": str(tmp_path), "encoder": str(tmp_path), "family": family}
    with pytest.raises((RuntimeError, Unmeasured)) as failed:
        retrieval.make_served(**settings, num_rollouts=1, same_share=0.0, at_once=False)
    if family == "declared":
        assert str(failed.value) == "it serves minilm, e5, bge, not declared"
    else:  # there are no vectors
        assert "vectors.npy" in capfd.readouterr().err


@pytest.mark.slow
def test_engine_and_server_find_the_same_passages_in_the_order_of_the_queries(
    tmp_path, monkeypatch
):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = tmp_path / "bert"
    write_tiny_bert(model)
    words = ("the", "city", "river", "want", "a", "b")
    texts = [" ".join(three) for three in itertools.permutations(words, 3)]
    passages = [[f"p{i}", f"{text}\n{text} un"] for i, text in enumerate(texts)]
    told = {"texts": texts, "passages": passages}
    (tmp_path / "texts.json").write_text(json.dumps(told))
    encoder = load_encoder(str(model), family="minilm")
    vectors = encoder.encode_passages([contents for _, contents in passages])
    np.save(tmp_path / "vectors.npy", vectors)
    settings = {
        "folder": str(tmp_path),
        "encoder": str(model),
        "family": "minilm",
        "num_rollouts": 16,
        "same_share": 0.5,
    }
    engine = retrieval.make_engine(**settings)
    first = [engine()["first"] for _ in range(2)]
    servers, popen = [], subprocess.Popen

    def start(*args, **settings):
        servers.append(popen(*args, **settings))
        return servers[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    for at_once in (True, False):
        served = retrieval.make_served(**settings, at_once=at_once)
        assert [served()["first"] for _ in range(2)] == first
        servers[-1].stdin.close()
        assert servers[-1].wait(10) == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cases": "fake"}, "--cases=fake: must be of real, made, rollouts"),
        ({"recall": 1.5}, "--recall=1.5, expected above 0"),
        ({"noise": float("nan")}, "--noise=nan, expected a number of at least 0"),
        ({"noise": -0.5}, "--noise=-0.5, expected a number of at least 0"),
    ],
)
def test_flags_that_cannot_be_measured_are_refused(changed, message):
    given = {name: default for name, (default, _) in retrieval.FLAGS.items()}
    with pytest.raises(ValueError, match=message):
        retrieval.measure(lambda: Bench(MACHINE, 1), **{**given, **changed})
