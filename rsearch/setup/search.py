"""Open the search engine that a configuration names."""

import functools
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
    lies_beside,
    open_index,
    read_index_manifest,
    stored_corpus,
)
from rsearch.retrieval.per_question import QuestionCorpora, encoded_corpora
from rsearch.retrieval.rerank import CrossEncoderScores, RerankedSearch
from rsearch.retrieval.service import RemoteSearch
from rsearch.retrieval.user import UserSearch
from rsearch.retrieval.wrap import wrap_search
from rsearch.runtime.files import expand
from rsearch.setup.models import searches_paragraphs, searches_words
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
        c: the configuration.
        world: the embedded one, if the configuration searches it.
        search: a user's SearchFn that is called in place of all these. The first
            config.retrieval.top_k of its passages count, and no reranker orders these.
        offline: a service is not contacted, and may be down.

    Raises:
        ValueError: no index is named, or it was built for something else.
    """
    if search is not None:
        return UserSearch("search", search, top_k=c.retrieval.top_k)
    return _wrapped(c, _open_engine(c, world, _num_retrieved(c), offline=offline))


def open_paragraphs(
    c: ConfigDict, questions: Sequence, pool: Sequence, paragraphs_of: Callable
) -> QuestionCorpora | RerankedSearch:
    """Open the engine over a corpus for each question, see `draw_corpora`.

    Args:
        c: the configuration.
        questions: Questions that are asked.
        pool: all that config.data.dev names, whose paragraphs fill the corpora.
        paragraphs_of: a ParagraphsOf that reads them.

    Raises:
        ValueError: a question has no paragraphs, or the encoder cannot be used.
    """
    num_words = c.retrieval.corpus_words
    passages, corpora = draw_corpora(
        questions, pool, paragraphs_of, num_words=num_words
    )
    top_k = _num_retrieved(c)
    if not searches_words(c):
        engine = encoded_corpora(open_encoder(c), passages, corpora, top_k=top_k)
        return _wrapped(c, engine)

    def make_index(rows):
        return index_words([passages[row] for row in rows])

    settings = dict(top_k=top_k, made_by=BY_WORDS)
    engine = QuestionCorpora(make_index, None, passages, corpora, **settings)
    return _wrapped(c, engine)


def _num_retrieved(c) -> int:
    """Return the passages that the engine finds for a query."""
    r = c.retrieval
    return r.rerank_from if r.reranker else r.top_k


def _wrapped(c, engine):
    """Return an engine with what the configuration puts around it."""
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
    """Return the settings of an encoder, by the names of `load_encoder`."""
    names = "family", "max_query_tokens", "max_passage_tokens"
    return {"dim": r.hashed_dim, **{name: r[name] for name in names}}


def text_encoders(c: ConfigDict) -> tuple[Embed, Embed]:
    """Return what embeds questions, and passages, as the search does.

    The encoder is loaded on first use. The functions raise ValueError where the search
    has none.
    """

    @functools.cache
    def load():
        r = c.retrieval
        for name in ("engine", "url"):
            if r[name]:
                raise ValueError(f"config.retrieval.{name} = {r[name]!r}{NO_ENCODER}")
        if searches_words(c):
            raise ValueError(f"config.retrieval.index = {r.index!r}{NO_ENCODER}")
        return open_encoder(c)

    def embed_passages(texts):
        return load().encode_passages(texts)

    return lambda texts: encode_queries(load(), texts), embed_passages


def check_index(c: ConfigDict) -> None:
    """Refuse an index that does not fit its corpus, encoder or words.

    Manifests and digests are compared: nothing is opened, and no weights are loaded. An
    encoder that is not in a directory here is compared when it is.

    Raises:
        ValueError: no index is named, none that was finished, no corpus behind it, or
            one of another encoder, kind or corpus.
    """
    r = c.retrieval
    if r.engine or r.url or r.corpus == WORLD or searches_paragraphs(c):
        return
    if not r.index:
        raise ValueError(
            "config.retrieval.index is empty; build one: python -m rsearch.index "
            f"--corpus={r.corpus} --encoder={r.encoder} --family={r.family} --out=DIR"
        )
    named = f"config.retrieval.index = {r.index!r}"
    manifest = read_index_manifest(expand(r.index))
    if not r.corpus:
        stored_corpus(r.index)
    elif not expand(r.corpus).is_file():
        raise ValueError(f"config.retrieval.corpus = {r.corpus!r}: no such file")
    is_of_words = searches_words(c)
    if r.bm25_index:
        merged = f"config.retrieval.bm25_index = {r.bm25_index!r}"
        words = read_index_manifest(expand(r.bm25_index))
        if is_of_words:
            raise ValueError(
                f"{merged} is merged with an index of vectors, but {named} is of "
                "kind=bm25"
            )
        if not is_bm25(r.bm25_index):
            raise ValueError(f"{merged} is an index of vectors, not of kind=bm25")
        if words.get("corpus") != manifest.get("corpus"):
            raise ValueError(f"{merged} and {named} were built of different corpora")
    if is_of_words:
        return
    expected = encoder_fingerprint(r.encoder, **_encoder_settings(r))
    made_by = manifest.get("encoder")
    stored = made_by.get("fingerprint") if isinstance(made_by, dict) else made_by
    if expected not in (None, stored):
        raise ValueError(
            f"{named} was built with the encoder {stored}, not with "
            f"config.retrieval.encoder = {r.encoder!r}, which is {expected} with the "
            "family, hashed_dim, max_query_tokens and max_passage_tokens here"
        )


def _open_engine(c, world, top_k, *, offline):
    """Open the engine that finds `top_k` passages for a query."""
    r = c.retrieval
    settings = dict(top_k=top_k, cache_size=r.cache_size)
    if searches_paragraphs(c):
        raise ValueError(
            "config.retrieval.corpus = 'paragraphs' is searched by rsearch.evaluate "
            "alone, for the questions of config.data.dev: name another corpus"
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
    if searches_words(c):
        if r.sharded and processes.num_hosts() > 1:
            raise ValueError(
                f"config.retrieval.sharded=True, but {r.index} is of kind=bm25, which "
                "every host opens by itself: expected False"
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
                "but with config.rollout.global_mesh every program is one of all "
                "chips: expected False"
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
        fingerprint += " exact"  # codes, which are not used then, find other passages
    if r.bm25_index:
        words, manifest = open_bm25(r.bm25_index, corpus=corpus)
        fingerprint += f" {manifest['digest']} {FINGERPRINT}"
        nearest, encoder = FusedIndex(nearest, encoder, words), None
    return SearchEngine(nearest, encoder, corpus, fingerprint=fingerprint, **settings)


def _open_corpus(c):
    """Open the corpus that the configuration names, or else the index."""
    r = c.retrieval
    path, cache = r.corpus, r.corpus_cache
    if not path:
        path = corpus_path(r.index)
        if not lies_beside(r.index, path):
            cache = cache or r.index  # nobody here has named that other directory
    return Corpus(path, cache=cache or None, on_bad=c.data.on_bad)
