"""Compute fingerprints of the model directories that a configuration names.

Every byte of the weights counts. They are read in the background while everything else
is loaded, and only if their digests are not in the cache of rsearch.runtime.digests.
"""

import concurrent.futures
import functools
import pathlib
import threading
from collections.abc import Callable
from multiprocessing.pool import ThreadPool

import xxhash
from ml_collections import ConfigDict

from rsearch.config.stage_plan import (
    PARAGRAPHS,
    ROLES,
    STAGE_PREFIX,
    URLS,
    WORLD,
    kinds,
)
from rsearch.retrieval.index import BM25, is_bm25
from rsearch.runtime import console, digests, files

READERS = 4  # files of a directory to read in parallel: one does not keep a disk busy
# Files other than weights that shape a model's inputs and outputs.
CONFIG_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "modules.json", "1_Pooling/config.json"),
    *("sentence_bert_config.json", "config_sentence_transformers.json"),
)
NO_WEIGHTS = ("tokenizer.source",)  # fields naming a directory whose weights are unused


def model_sources(c: ConfigDict, *, only_dev: bool, asks_judge: bool) -> dict[str, str]:
    """Return {field: source} of the models read from directories, except the policy.

    Stages and endpoints are left out, as are models of the embedded world, which are
    determined by the fields of the configuration.

    Args:
        only_dev: whether the configuration is only for an evaluation.
    """
    r, roles = c.retrieval, {*ROLES}
    if not asks_judge:
        roles -= {"judge"}
    if only_dev or "rl" not in kinds(c) or not c.rl.memorise_coef:
        roles -= {"rewriter"}
    sources = {f"models.{role}.source": c.models[role].source for role in sorted(roles)}
    sources["tokenizer.source"] = c.tokenizer.source
    sources["retrieval.reranker"] = r.reranker
    if not (r.engine or r.url or r.encoder == "hashed" or uses_bm25(c)):
        sources["retrieval.encoder"] = r.encoder
    skipped_prefixes = (STAGE_PREFIX, *URLS, f"{WORLD}:")
    return {
        field: source
        for field, source in sources.items()
        if source and source != WORLD and not source.startswith(skipped_prefixes)
    }


def uses_bm25(c: ConfigDict) -> bool:
    """Return whether the search uses a BM25 index, which has no encoder.

    Raises:
        ValueError: the manifest of the index was changed.
    """
    r = c.retrieval
    if searches_paragraphs(c):
        return r.index == BM25
    uses_index = r.index and r.corpus != WORLD and not (r.engine or r.url)
    return bool(uses_index) and is_bm25(r.index)


def searches_paragraphs(c: ConfigDict) -> bool:
    """Return whether each question's search is over its own paragraphs."""
    return c.retrieval.corpus == PARAGRAPHS


def start_fingerprint(
    field: str, find: Callable[[], pathlib.Path]
) -> Callable[[], dict[str, str]]:
    """Start reading a model's directory; return a function that waits for the result.

    Args:
        field: the field of the configuration that names the model.
        find: returns the model's directory.

    Returns:
        A function () -> {field: fingerprint of the weights, field.config: fingerprint
        of the model's configuration, tokenizer and template}. The dict is empty if
        there is no such model, which loading it will report. The function raises a
        ValueError if a file cannot be read.
    """
    future = concurrent.futures.Future()

    def run():
        try:
            try:
                directory = find()
            except ValueError:
                future.set_result({})
            else:
                future.set_result(_fingerprints(field, directory))
        except BaseException as error:  # raised by the function that waits
            future.set_exception(error)

    # A daemon thread, so that an interrupted start does not wait for it.
    threading.Thread(target=run, daemon=True).start()
    return future.result


def _fingerprints(field, directory):
    """Return {name: fingerprint} of a model's directory."""
    digest = xxhash.xxh3_128()
    try:
        for name in CONFIG_FILES:
            if (directory / name).is_file():
                content = files.digest_file(directory / name)
                digest.update(f"{name} {content}\n".encode())
        fingerprints = {
            f"{field}.config": digests.FULL_DIGEST_PREFIX + digest.hexdigest()
        }
        weights = sorted(directory.glob("*.safetensors"))
        if field in NO_WEIGHTS or not weights:
            return fingerprints
        progress = console.note_now_and_then(
            lambda path, num_read, size: (
                f"{field}: digest of {path}, computed once: {num_read / 2**30:.1f} of "
                f"{size / 2**30:.1f} GiB"
            )
        )
        compute_digest = functools.partial(digests.weights_digest, progress=progress)
        with ThreadPool(READERS) as readers:
            contents = readers.map(compute_digest, weights, chunksize=1)
    except OSError as error:
        raise ValueError(f"config.{field}: {error}") from error
    named_digests = (
        f"{path.name} {c}" for path, c in zip(weights, contents, strict=True)
    )
    return fingerprints | {field: ", ".join(named_digests)}
