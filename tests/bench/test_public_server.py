"""The server that this package's engine is compared with."""

import json

import numpy as np
import pytest

from rsearch.bench import peers
from tests.models.tiny_bert import write_tiny_bert


@pytest.mark.parametrize(("has_gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_queries_are_encoded_on_a_gpu_if_there_is_one(
    has_gpu, device, tmp_path, monkeypatch
):
    """The GPU is faked: `to` records its target and moves nothing."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    moved = []

    def move(what, place):
        moved.append((type(what).__name__, place))
        return what

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    for owner in (transformers.PreTrainedModel, transformers.BatchEncoding):
        monkeypatch.setattr(owner, "to", move)
    write_tiny_bert(tmp_path / "bert")
    passages = [["p", "a city"], ["q", "a river"]]
    (tmp_path / "texts.json").write_text(json.dumps({"passages": passages}))
    np.save(tmp_path / "vectors.npy", np.eye(2, 24, dtype=np.float32))
    search = peers.make_exact_search(tmp_path, str(tmp_path / "bert"), "minilm")
    assert {hit["document"]["id"] for hit in search("the city", 2)} == {"p", "q"}
    assert moved == [("BertModel", device), ("BatchEncoding", device)]
