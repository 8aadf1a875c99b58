"""No pickle is read. The run of `small_run.finished` checks training and evaluation."""

from tests.small_run import run_python

# Runs in a process of its own, since audit hooks cannot be removed.
PROGRAM = """
import pathlib, pickle, sys
from tests.interrupted_run import log_of_pickles
folder, heard = pathlib.Path(sys.argv[1]), log_of_pickles()

from rsearch.retrieval.engine import SearchEngine
from rsearch.retrieval.index import open_index
from rsearch.retrieval.index_build import build_index
from tests.retrieval.fakes import FileCorpus, TableEncoder, numbered

(folder / "corpus.jsonl").write_text("here")
corpus = FileCorpus(numbered(60), folder / "corpus.jsonl")
encoder = TableEncoder()
build_index(corpus, encoder, folder / "i", kind="partitioned")
index = open_index(folder / "i", corpus=corpus, encoder=encoder)
found = SearchEngine(index.nearest, encoder, corpus, top_k=4)(["t7"])
assert found[0][0].id == "p7"
assert not heard, heard

import _pickle, io
packed = pickle.dumps(pathlib.PurePosixPath("a"))
def in_python(packed):
    return pickle._Unpickler(io.BytesIO(packed)).load()

for read in (pickle.loads, _pickle.loads, in_python):
    before = len(heard)
    assert read(packed) == pathlib.PurePosixPath("a")
    assert len(heard) > before and "a pickle names" in heard[-1], read
assert pickle.loads(pickle.dumps([1])) == [1] and "pickle.loads" in heard[-1]
"""


def test_an_index_is_built_opened_and_searched_without_a_pickle(tmp_path):
    """The hooks also report every pickle, whichever way it is read."""
    done = run_python("-c", PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
