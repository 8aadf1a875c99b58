"""Open the search engine that a configuration names."""

import functools
import shlex
from collections.abc import Callable, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from rsearch.data.corpus import Corpus
from rsearch.data.paragraphs import draw_corpora
from rsearch.hosts import processes
from rsearch.retrieval.bm25 import FINGERPRINT as BY_WORDS
from rsearch.retrieval.bm25 import index_words, open_bm25
from rsearch.retrieval.device_search import nearest_on_devices
from rsearch.retrieval.distributed import distribute_index
from rsearch.retrieval.encoder import encoder_fingerprint, load_encoder
from rsearch.retrieval.engine import SearchEngine, encode_queries, engine_in_memory
from rsearch.retrieval.fused import FINGERPRINT, FusedIndex
from rsearch.retrieval.index import (
    corpus_path,
    is_bm25,
    is_next_to_index,
    open_index,
    read_index_manifest,
    resolve_corpus_path,
)
from rsearch.retrieval.per_question import QuestionCorpora, encode_corpora
from rsearch.retrieval.rerank import CrossEncoderScores, RerankedSearch
from rsearch.retrieval.service import RemoteSearch
from rsearch.retrieval.user import UserSearch
from rsearch.retrieval.wrap import wrap_search
from rsearch.runtime.files import expand
from rsearch.setup.models import searches_paragraphs, uses_bm25
from rsearch.world.world import WORLD, World

Embed = Callable[[Sequence[str]], np.ndarray]
NO_ENCODER = (
    " has no encoder, which methods of config.eval.methods ('skr', 'adaptive_rag', "
    "'recomp_extractive', 'rearter' and 'cr_planner') compare texts by"
)


def open_search(
    c: ConfigDict,
    world: World | None,
    search: Callable | None = None,
    *,
    offline: bool = False,
) -> SearchEngine | RemoteSearch | RerankedSearch | UserSearch:
    """Open the engine over the world's passages, a saved index or a service.

    Args:
        world: the embedded world, if the configuration searches it.
        search: a user's SearchFn to call in place of all these. The first
            config.retrieval.top_k of its passages are used, without reranking.
        offline: whether not to contact a service, which may then be down.

    Raises:
        ValueError: no index is named, or it was built for another corpus or encoder.
    """
    if search is not None:
        return UserSearch("search", search, top_k=c.retrieval.top_k)
    return _wrapped(c, _open_engine(c, world, _num_retrieved(c), offline=offline))


def open_paragraphs(
    c: ConfigDict, questions: Sequence, pool: Sequence, paragraphs_of: Callable
) -> QuestionCorpora | RerankedSearch:
    """Open the engine that searches a separate corpus for each question.

    Args:
        pool: all Questions of config.data.dev, whose paragraphs fill the corpora; see
            `draw_corpora`.

    Raises:
        ValueError: a question has no paragraphs, or the encoder cannot be used.
    """
    num_words = c.retrieval.corpus_words
    passages, corpora = draw_corpora(
        questions, pool, paragraphs_of, num_words=num_words
    )
    top_k = _num_retrieved(c)
    if not uses_bm25(c):
        engine = encode_corpora(open_encoder(c), passages, corpora, top_k=top_k)
        return _wrapped(c, engine)

    def make_index(rows):
        return index_words([passages[row] for row in rows])

    settings = dict(top_k=top_k, made_by=BY_WORDS)
    engine = QuestionCorpora(make_index, None, passages, corpora, **settings)
    return _wrapped(c, engine)


def _num_retrieved(c) -> int:
    """Return the number of passages that the engine retrieves per query."""
    r = c.retrieval
    return r.rerank_from if r.reranker else r.top_k


def _wrapped(c, engine):
    """Wrap an engine in the layers that the configuration asks for."""
    r = c.retrieval
    return wrap_search(
        engine,
        page_chars=r.page_chars if r.url and r.fetch_pages else 0,
        page_seconds=r.timeout_seconds / 3,
        rerank=CrossEncoderScores(r.reranker) if r.reranker else None,
        rerank_from=r.rerank_from,
        top_k=r.top_k,
        cache_size=r.cache_size,
    )


def open_encoder(c: ConfigDict):
    """Load the encoder of queries and passages."""
    return load_encoder(c.retrieval.encoder, **_encoder_settings(c.retrieval))


def _encoder_settings(r):
    """Return the settings of an encoder as keyword arguments of `load_encoder`."""
    names = "family", "max_query_tokens", "max_passage_tokens"
    return {"dim": r.hashed_dim, **{name: r[name] for name in names}}


def text_encoders(c: ConfigDict) -> tuple[Embed, Embed]:
    """Return functions that embed questions, and passages, as the search does.

    The encoder is loaded on first use. The functions raise ValueError if the search has
    no encoder.
    """

    @functools.cache
    def load():
        check_encoder(c)
        return open_encoder(c)

    return (
        lambda texts: encode_queries(load(), texts),
        lambda texts: load().encode_passages(texts),
    )


def check_encoder(c: ConfigDict) -> None:
    """Refuse a search that has no encoder.

    Raises:
        ValueError: names the field of the search.
    """
    r = c.retrieval
    for name in ("engine", "url"):
        if r[name]:
            raise ValueError(f"config.retrieval.{name} = {r[name]!r}{NO_ENCODER}")
    if uses_bm25(c):
        raise ValueError(f"config.retrieval.index = {r.index!r}{NO_ENCODER}")


def check_index(c: ConfigDict) -> None:
    """Refuse an index that does not match its corpus, encoder or BM25 index.

    Only manifests and digests are compared: no index is opened and no weights are
    loaded. An encoder that is not yet in a local directory is compared when it is
    loaded.

    Raises:
        ValueError: no index is named, it is unfinished, its corpus is missing, or it
            is of another encoder, kind or corpus.
    """
    r = c.retrieval
    if r.engine or r.url or r.corpus == WORLD or searches_paragraphs(c):
        return
    if not r.index:
        raise ValueError(
            "config.retrieval.index is empty; build one: python -m rsearch.index "
            f"--corpus={shlex.quote(r.corpus or 'FILE')} "
            f"--encoder={shlex.quote(r.encoder)} --family={r.family} --out=DIR"
        )
    index_field = f"config.retrieval.index = {r.index!r}"
    manifest = read_index_manifest(expand(r.index))
    if not r.corpus:
        resolve_corpus_path(r.index)
    elif not expand(r.corpus).is_file():
        raise ValueError(f"config.retrieval.corpus = {r.corpus!r}: no such file")
    is_lexical = uses_bm25(c)
    if r.bm25_index:
        bm25_field = f"config.retrieval.bm25_index = {r.bm25_index!r}"
        bm25_manifest = read_index_manifest(expand(r.bm25_index))
        if is_lexical:
            raise ValueError(
                f"{bm25_field} is merged with an index of vectors, but {index_field} "
                "is of kind=bm25"
            )
        if not is_bm25(r.bm25_index):
            raise ValueError(f"{bm25_field} is an index of vectors, not of kind=bm25")
        if bm25_manifest.get("corpus") != manifest.get("corpus"):
            raise ValueError(
                f"{bm25_field} and {index_field} were built from different corpora"
            )
    if is_lexical and r.on_devices:
        raise ValueError(
            f"config.retrieval.on_devices = True puts the vectors of an index on the "
            f"accelerators, but {index_field} is of kind=bm25 and has none"
        )
    if is_lexical:
        return
    expected = encoder_fingerprint(r.encoder, **_encoder_settings(r))
    entry = manifest.get("encoder")
    stored_encoder = entry.get("fingerprint") if isinstance(entry, dict) else entry
    if expected not in (None, stored_encoder):
        raise ValueError(
            f"{index_field} was built with the encoder {stored_encoder}, not with "
            f"config.retrieval.encoder = {r.encoder!r}, which is {expected} with the "
            "family, hashed_dim, max_query_tokens and max_passage_tokens here"
        )


def _open_engine(c, world, top_k, *, offline):
    """Open the engine that retrieves `top_k` passages per query."""
    r = c.retrieval
    settings = dict(top_k=top_k, cache_size=r.cache_size)
    if searches_paragraphs(c):
        raise ValueError(
            "config.retrieval.corpus = 'paragraphs' is only for rsearch.evaluate and "
            "the questions of config.data.dev: name another corpus"
        )
    if r.engine:
        return UserSearch("config.retrieval.engine", r.engine, top_k=top_k)
    if r.url:
        names = "api", "api_key_env", "key_over_http", "timeout_seconds"
        names += "max_retries", "outage_seconds", "site"
        search = RemoteSearch(r.url, **settings, **{name: r[name] for name in names})
        if not offline:
            search.check()
        return search
    check_index(c)
    if uses_bm25(c):
        if r.sharded and processes.num_hosts() > 1:
            raise ValueError(
                f"config.retrieval.sharded=True, but {r.index} is of kind=bm25, which "
                "every host opens in full: expected False"
            )
        corpus = _open_corpus(c)
        words, manifest = open_bm25(r.index, corpus=corpus)
        fingerprint = f"index {manifest['digest']}"
        return SearchEngine(words, None, corpus, fingerprint=fingerprint, **settings)
    encoder = open_encoder(c)
    if r.corpus == WORLD:
        return engine_in_memory(world.passages, encoder, **settings)
    corpus = _open_corpus(c)
    opening = functools.partial(open_index, r.index, corpus=corpus, encoder=encoder)
    if r.on_devices:
        if c.rollout.global_mesh and processes.num_hosts() > 1:
            raise ValueError(
                "config.retrieval.on_devices = True compiles a program for each chip, "
                "but with config.rollout.global_mesh every program runs on all chips: "
                "expected False"
            )
        make_nearest = functools.partial(
            nearest_on_devices, devices=jax.local_devices()
        )
        opening = functools.partial(opening, make_nearest=make_nearest)
    if r.sharded and processes.num_hosts() > 1:
        shard = dict(host=processes.host_index(), num_hosts=processes.num_hosts())
        opening = functools.partial(opening, **shard)
        nearest, manifest = distribute_index(opening, timeout_seconds=r.timeout_seconds)
    else:
        index = opening()
        nearest, manifest = index.nearest, index.manifest
    fingerprint = f"index {manifest['digest']}"
    if r.on_devices and manifest["partition"] is not None:
        fingerprint += " exact"  # the index's codes are not used, so results differ
    if r.bm25_index:
        words, manifest = open_bm25(r.bm25_index, corpus=corpus)
        fingerprint += f" {manifest['digest']} {FINGERPRINT}"
        nearest, encoder = FusedIndex(nearest, encoder, words), None
    return SearchEngine(nearest, encoder, corpus, fingerprint=fingerprint, **settings)


def _open_corpus(c):
    """Open the corpus that the configuration or, failing that, the index names."""
    r = c.retrieval
    path, cache = r.corpus, r.corpus_cache
    if not path:
        path = corpus_path(r.index)
        if not is_next_to_index(r.index, path):
            cache = cache or r.index  # the user did not name that other directory
    return Corpus(path, cache=cache or None, on_bad=c.data.on_bad)
