"""The parts that a configuration names, each loaded on its own."""

import dataclasses
import functools

import jax.numpy as jnp

from rsearch.config.stage_plan import QUESTIONS, kinds, stage_file
from rsearch.data.chains import decomposition, gold_passages
from rsearch.data.corpus import Corpus
from rsearch.data.questions import load_questions
from rsearch.hosts import processes
from rsearch.models.decoder import Decoder, DecoderSpec
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.hf import config as hf_config
from rsearch.models.small_tokenizer import train_tokenizer
from rsearch.models.tokenizer import Tokenizer, load_tokenizer
from rsearch.protocols import plain
from rsearch.protocols.base import Protocol
from rsearch.protocols.table import make_protocol
from rsearch.retrieval.distributed import distribute_index
from rsearch.retrieval.encoder import load_encoder
from rsearch.retrieval.engine import SearchEngine, engine_in_memory
from rsearch.retrieval.index import corpus_path, open_index
from rsearch.retrieval.rerank import RerankedSearch, load_reranker
from rsearch.retrieval.service import RemoteSearch
from rsearch.retrieval.user import UserSearch
from rsearch.retrieval.wrap import wrap_search
from rsearch.rollout.conversation import (
    Limits,
    conversation_tokens,
    markup_tokens,
    prompt_ids,
)
from rsearch.text.normalize import normalize_squad
from rsearch.types import Question
from rsearch.world.reading import prompts
from rsearch.world.texts import world_words

WORLD = "world"
MAX_NAMED = 5  # questions and records named when they are left out


def has_world(c) -> bool:
    """Whether a configuration names the embedded world anywhere."""
    named = [c.tokenizer.source, c.retrieval.corpus]
    if "sft" in kinds(c):
        named.append(c.sft.demonstrations)
    files = (c.data.train, c.data.dev)
    return WORLD in named or any(f.startswith(f"{WORLD}:") for f in files)


def load_policy_tokenizer(c, world, source) -> Tokenizer:
    """The tokenizer: of the world, of a directory, or of the model at `source`."""
    if c.tokenizer.source == WORLD:
        return world_tokenizer(world)
    if c.tokenizer.source:
        return load_tokenizer(huggingface.find_model(c.tokenizer.source))
    return load_tokenizer(source)


def world_tokenizer(world) -> Tokenizer:
    """The one tokenizer of all that talk about a world, whatever their protocol."""
    # Twice, as a word must occur twice to be worth a token.
    return train_tokenizer(world.texts() + world_words(world) + 2 * prompts())


def policy_protocol(c) -> Protocol:
    """The protocol, in the words and with the settings of config.protocol."""
    p = c.protocol
    protocol = plain.reworded(
        make_protocol(
            p.name,
            max_queries=p.max_queries or None,
            quotes_keep_commas=p.quotes_keep_commas,
            json_ascii=p.json_ascii,
        ),
        user=p.instruction,
        system=p.system,
        invalid_message=p.invalid_message,
    )
    if c.rollout.on_invalid == "end":
        protocol = dataclasses.replace(protocol, invalid_message=None)
    return protocol


def policy_model(c, tokenizer, source) -> Decoder:
    """The network, shaped by the model at `source` or else by config.model.

    Raises:
        ValueError: the tokenizer has more ids than the embedding has rows.
    """
    m = c.model
    if source is not None:
        spec = hf_config.read_spec(source)
    else:
        spec = DecoderSpec(
            vocab_size=m.vocab_size or tokenizer.vocab_size,
            width=m.width,
            num_layers=m.num_layers,
            num_heads=m.num_heads,
            num_kv_heads=m.num_kv_heads,
            head_dim=m.head_dim,
            mlp_width=m.mlp_width,
            rope_theta=m.rope_theta,
            tie_embeddings=m.tie_embeddings,
            qkv_bias=m.qkv_bias,
        )
    if tokenizer.vocab_size > spec.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model's embedding "
            f"only {spec.vocab_size} rows: they do not belong together"
        )
    return Decoder(spec, dtype=jnp.dtype(m.dtype), remat=m.remat)


def budgets(c, tokenizer, protocol, spec) -> tuple[Limits, int]:
    """The limits of a rollout, and the tokens of the longest."""
    r = c.rollout
    limits = Limits(
        max_searches=r.max_searches,
        max_prompt_tokens=r.max_prompt_tokens,
        max_turn_tokens=r.max_turn_tokens,
        max_observation_tokens=r.max_observation_tokens,
        forced_final_turn=r.forced_final_turn,
        cuts_tags=r.cut_tags,
    )
    markup = markup_tokens(tokenizer, protocol)
    needed = conversation_tokens(limits, markup)
    have = r.context_tokens or needed
    found = f"{markup.parts} x " if markup.parts > 1 else ""
    echo = f"{r.max_turn_tokens} of queries + " if markup.echoes else ""
    arithmetic = (
        f"prompt {r.max_prompt_tokens} + {limits.num_turns} turns x "
        f"{r.max_turn_tokens} + {limits.num_turns - 1} observations x "
        f"max({found}{r.max_observation_tokens} + {echo}{markup.tags} of tags, "
        f"{markup.message} of the invalid-action message) = {needed} tokens"
    )
    if have < needed:
        raise ValueError(
            f"config.rollout.context_tokens = {have} is too small: {arithmetic}"
        )
    if have > spec.max_context:
        raise ValueError(f"{arithmetic}, but the model's context is {spec.max_context}")
    return limits, have


def open_search(c, world) -> SearchEngine | RemoteSearch | RerankedSearch:
    """The engine over the world's passages or a saved index, reranked if so named.

    Raises:
        ValueError: no index is named, or it was built for something else.
    """
    r = c.retrieval
    engine = _open_engine(c, world, r.rerank_from if r.reranker else r.top_k)
    return wrap_search(
        engine,
        page_chars=r.page_chars if r.url and r.fetch_pages else 0,
        page_seconds=r.timeout_seconds / 3,
        rerank=load_reranker(r.reranker) if r.reranker else None,
        rerank_from=r.rerank_from,
        top_k=r.top_k,
        cache_size=r.cache_size,
    )


def open_encoder(c):
    """The encoder of queries and passages."""
    r = c.retrieval
    return load_encoder(
        r.encoder,
        family=r.family,
        dim=r.hashed_dim,
        max_query_tokens=r.max_query_tokens,
        max_passage_tokens=r.max_passage_tokens,
    )


def _open_engine(c, world, top_k):
    """The engine that finds `top_k` passages by their vectors."""
    r = c.retrieval
    settings = dict(top_k=top_k, cache_size=r.cache_size)
    if r.engine:
        return UserSearch("config.retrieval.engine", r.engine, top_k=top_k)
    if r.url:
        names = "api", "api_key_env", "timeout_seconds", "max_retries", "outage_seconds"
        search = RemoteSearch(r.url, **settings, **{name: r[name] for name in names})
        search.check()
        return search
    encoder = open_encoder(c)
    if r.corpus == WORLD:
        return engine_in_memory(world.passages, encoder, **settings)
    if not r.index:
        raise ValueError(
            "config.retrieval.index is empty; build one: python -m rsearch.index "
            f"--corpus={r.corpus} --encoder={r.encoder} --family={r.family} --out=DIR"
        )
    corpus = Corpus(r.corpus or corpus_path(r.index), cache=r.corpus_cache or None)
    opening = functools.partial(open_index, r.index, corpus=corpus, encoder=encoder)
    if r.sharded and processes.num_hosts() > 1:
        place = dict(host=processes.host_index(), num_hosts=processes.num_hosts())
        opening = functools.partial(opening, **place)
        nearest, manifest = distribute_index(opening, timeout_seconds=r.timeout_seconds)
    else:
        index = opening()
        nearest, manifest = index.nearest, index.manifest
    known_by = f"index {manifest['digest']}"
    return SearchEngine(nearest, encoder, corpus, fingerprint=known_by, **settings)


def read_questions(c, split, world, say, home=None) -> tuple[Question, ...]:
    """The questions of "train" or "dev"; `say` hears of records left out.

    A source "stage:<name>" means the questions that this stage of the run at `home`
    has written.

    Raises:
        ValueError: a file that cannot be used, or a split the world does not have.
    """
    source, limit = c.data[split], c.data[f"max_{split}"]
    source = stage_file(source, QUESTIONS, home)
    if source.startswith(f"{WORLD}:"):
        part = source.removeprefix(f"{WORLD}:")
        if part not in ("train", "dev"):
            raise ValueError(
                f"config.data.{split} = {source!r}: the world has world:train and "
                "world:dev"
            )
        questions = getattr(world, part)
        return questions[: limit or None]
    names = ("question", "answers", "id")
    fields = {n: c.data[f"fields_{n}"] for n in names if c.data[f"fields_{n}"]}
    check = _check_for_chains(c, world) if split == "train" else None
    questions, problems = load_questions(
        source, fields=fields, limit=limit, on_bad=c.data.on_bad, check=check
    )
    for problem in problems[:MAX_NAMED]:
        say(f"left out of {split}: {problem}")
    if len(problems) > MAX_NAMED:
        say(f"left out of {split}: {len(problems):,} bad records in all")
    return tuple(questions)


def _check_for_chains(c, world):
    """Refuses a question that does not tell what its chain is made from; or None."""
    method = c.curate.method if "curate" in kinds(c) else None
    if method == "no_reasoning":
        tells = decomposition
    elif method == "chains" and c.curate.observations == "gold":
        tells = functools.partial(gold_passages, known={})
    else:
        return None

    def check(question):
        if world is None or question.id not in world.hops:  # which has them all
            tells(question, ())

    return check


def apart(train, dev, say, *, drops) -> tuple[Question, ...]:
    """The training questions; `say` hears how many of them are held out, too.

    Questions are the same whose words are, whatever their case and punctuation.

    Args:
        train, dev: questions.
        say: called with a line where there are any.
        drops: whether to leave these out.
    """
    held = {normalize_squad(question.text) for question in dev}
    both = [q for q in train if normalize_squad(q.text) in held]
    if not both:
        return train
    how = "config.data.decontaminate = True leaves them out"
    say(
        f"{len(both):,} of {len(train):,} training questions are held out, too, such "
        f"as {both[0].id}; {'left out of train' if drops else how}"
    )
    dropped = {q.id for q in both} if drops else set()
    return tuple(q for q in train if q.id not in dropped)


def fitting(questions, split, protocol, tokenizer, limits, say, *, limit=0):
    """The questions whose prompts are within their budget; `say` hears of the others.

    Args:
        questions: of "train" or "dev", the `split`.
        protocol: gives the prompt.
        tokenizer: counts its tokens.
        limits: its budget.
        say: called with a line on the first questions left out, and on their number.
        limit: how many are wanted; 0 is all that fit.

    Returns:
        The questions, and how many before the last of them were left out.
    """
    most = limits.max_prompt_tokens
    kept, num_long = [], 0
    for question in questions:
        if limit and len(kept) == limit:
            break
        chat = protocol.messages(question.text)
        count = len(prompt_ids(tokenizer, protocol, chat))
        if count <= most:
            kept.append(question)
            continue
        num_long += 1
        if num_long <= MAX_NAMED:
            say(f"left out of {split}: {question.id}, prompt {count} > {most} tokens")
    if num_long > MAX_NAMED:
        say(f"left out of {split}: {num_long:,} questions with long prompts in all")
    return tuple(kept), num_long
