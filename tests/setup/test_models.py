"""Every model directory that a configuration names is an input of its run."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from rsearch.runtime import files
from rsearch.setup.load import load_setup
from rsearch.setup.models import model_sources, start_fingerprint
from tests.models.tiny_bert import write_tiny_bert
from tests.small_run import config, quick_compilation

__all__ = ["quick_compilation"]

NAMED = dict(
    models__judge__source="a/judge",
    models__rewriter__source="a/rewriter",
    models__writer__source="/a/writer",
    models__reader__source="a/reader",
    models__answerer__source="http://127.0.0.1:1/v1",
    retrieval__reranker="a/reranker",
    retrieval__encoder="a/encoder",
    rl__memorise_coef=0.1,
)


@pytest.fixture
def model(tmp_path):
    """Return a model's directory with two shards."""
    for shard in "ab":
        save_file({"w": np.ones(9, np.float32)}, tmp_path / f"{shard}.safetensors")
    for name in ("config.json", "generation_config.json", "chat_template.jinja"):
        (tmp_path / name).write_text(json.dumps(name))
    return tmp_path


@pytest.mark.fault(72, "every directory")
def test_every_model_that_is_read_from_a_directory_is_a_source():
    c = config(**NAMED)
    everything = model_sources(c, only_dev=False, asks_judge=True)
    assert everything == {
        "models.judge.source": "a/judge",
        "models.rewriter.source": "a/rewriter",
        "models.writer.source": "/a/writer",
        "models.reader.source": "a/reader",
        "retrieval.reranker": "a/reranker",
        "retrieval.encoder": "a/encoder",
    }
    evaluated = model_sources(c, only_dev=True, asks_judge=False)
    assert everything.keys() - evaluated.keys() == {
        *("models.judge.source", "models.rewriter.source")
    }
    served = config(**NAMED, retrieval__url="http://127.0.0.1:1")
    assert "retrieval.encoder" not in model_sources(
        served, only_dev=False, asks_judge=True
    )
    named = dict(tokenizer__source="a/words", models__writer__source="stage:sft")
    assert model_sources(config(**named), only_dev=True, asks_judge=False) == {
        "tokenizer.source": "a/words"
    }
    # The embedded world and the hashed encoder follow from the configuration.
    assert not model_sources(config(), only_dev=True, asks_judge=False)


@pytest.mark.fault(72, "configuration and template")
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("a.safetensors", "model.source"),
        ("config.json", "model.source.config"),
        ("generation_config.json", "model.source.config"),
        ("chat_template.jinja", "model.source.config"),
        ("tokenizer.json", "model.source.config"),
        ("README.md", None),
    ],
)
def test_a_changed_file_changes_the_fingerprint_that_covers_it(model, name, field):
    before = start_fingerprint("model.source", lambda: model)()
    assert before.keys() == {"model.source", "model.source.config"}
    with open(model / name, "ab") as file:
        file.write(b"x")
    after = start_fingerprint("model.source", lambda: model)()
    assert {n for n in before if before[n] != after[n]} == {field} - {None}


@pytest.mark.fault(72, "an older run")
def test_a_fingerprint_contains_that_of_an_earlier_version(model):
    now = start_fingerprint("model.source", lambda: model)()["model.source"]
    shards = [model / "a.safetensors", model / "b.safetensors"]
    digests = [(f.name, files.sampled_digest(f), files.digest_file(f)) for f in shards]
    assert now == ", ".join(f"{name} {old} xxh3:{new}" for name, old, new in digests)


def test_no_weights_in_a_tokenizers_directory_are_read(model):
    actual = start_fingerprint("tokenizer.source", lambda: model)()
    assert actual.keys() == {"tokenizer.source.config"}


def test_a_missing_model_has_no_fingerprint_and_is_left_to_its_loader(tmp_path):
    def find():
        raise ValueError("no such model")

    assert start_fingerprint("models.reader.source", find)() == {}


def test_a_file_that_cannot_be_read_is_named(model):
    (model / "c.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"config\.model\.source.*c\.safetensors"):
        start_fingerprint("model.source", lambda: model)()


def test_a_runs_inputs_contain_the_fingerprints_of_its_models(tmp_path):
    directory = write_tiny_bert(tmp_path, cross_encoder=True)
    named = config(retrieval__reranker=str(directory), retrieval__rerank_from=4)
    inputs = load_setup(named, only_policy=True).inputs
    assert inputs["retrieval.reranker"].startswith("model.safetensors ")
    assert inputs["retrieval.reranker.config"].startswith("xxh3:")


def test_an_error_in_finding_a_model_is_raised_by_the_function_that_waits():
    def find():
        raise PermissionError("may not be searched")

    with pytest.raises(PermissionError, match="searched"):
        start_fingerprint("models.judge.source", find)()
