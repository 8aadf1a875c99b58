"""A tiny tokenizer, model, protocol and search engine for rollouts in tests.

Weights are random but large, so that attention is sharp, distributions are far from
uniform and a wrong cache is noticed. The protocol's stop strings are letters, so that
policies that write nonsense search, answer and fail at different times.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.models.decoder import Decoder, init_params
from rsearch.models.sharding import make_mesh
from rsearch.models.small_tokenizer import train_tokenizer
from rsearch.models.spec import DecoderSpec
from rsearch.protocols.base import Protocol
from rsearch.rollout.conversation import (
    Host,
    Limits,
    conversation_tokens,
    markup_tokens,
)
from rsearch.rollout.decode import Sampler
from rsearch.rollout.scheduler import RolloutEngine
from rsearch.rollout.stop_strings import token_automaton
from rsearch.tools.search import search_call
from rsearch.types import (
    Answer,
    Malformed,
    Observation,
    Passage,
    Question,
    ToolCall,
)

WORDS = (
    "who was born in the city where river mountain lies director film company <search> "
    "</search> <answer> </answer> <information> </information> Question Doc Title "
)


@pytest.fixture(autouse=True, scope="package")
def quick_compilation():
    """Turn XLA's and LLVM's optimisations off, which halves the time of the tests."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def tokenizer():
    """Return a tokenizer of 320 ids: bytes, four control tokens, words and tags."""
    return train_tokenizer([WORDS] * 3, vocab_size=340)


def spec(**changes):
    """Return the shape of the tiny model."""
    shape = dict(
        vocab_size=tokenizer().vocab_size,
        width=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_width=32,
        qkv_bias=True,
    )
    return DecoderSpec(**{**shape, **changes})


def model(**changes):
    """Return the tiny model."""
    return Decoder(spec(**changes))


@functools.cache
def params(seed=0, **changes):
    """Return its random parameters: standard deviation 0.3, norm scales around 1."""
    made = functools.partial(init_params, model(**changes))
    shapes, tree = jax.tree.flatten_with_path(jax.eval_shape(made, jax.random.key(0)))
    rng = np.random.default_rng(seed)
    leaves = [
        jnp.asarray(0.3 * rng.normal(size=x.shape) + (path[-1].key == "scale"), x.dtype)
        for path, x in shapes
    ]
    return jax.tree.unflatten(tree, leaves)


def parse_letters(turn):
    """Parse a turn by what comes first: 'r' searches, 'in' answers; else malformed."""
    ends = [(turn.find(s), s) for s in LETTERS.stop_strings if s in turn]
    if not ends:
        return Malformed("neither r nor in")
    end, letters = min(ends)
    return search_call(turn[:end]) if letters == "r" else Answer(turn[:end])


def observe_letters(queries, passages):
    """Return the passages of all queries between square brackets."""
    content = "".join(p.contents for results in passages for p in results)
    return Observation("\n[", content, "]\n")


def write_letters(action):
    """Return the end of a turn with this action."""
    is_search = isinstance(action, ToolCall)
    return "".join(action.arguments) + "r" if is_search else action.text + "in"


LETTERS = Protocol(
    name="letters",
    system="talk",
    user="{question}?",
    add_question_mark=False,
    stop_strings=("r", "in"),
    parse=parse_letters,
    show_passages=observe_letters,
    invalid_message="\nwhere?\n",
    render=write_letters,
    write=lambda step: step.thought + write_letters(step.action),
)

LIMITS = Limits(
    max_searches=3, max_prompt_tokens=27, max_turn_tokens=10, max_observation_tokens=13
)


def search(queries):
    """Return passages whose number (0 to 2) and length depend on the query."""
    results = []
    for query in queries:
        number = zlib.crc32(query.encode("utf-8", "replace"))
        text = "the river lies in born " * 3
        results.append(
            tuple(
                Passage(f"p{i}", text[: (number >> (4 * i)) % 50])
                for i in range(number % 3)
            )
        )
    return results


def questions(count):
    """Return questions of different lengths."""
    return [
        Question(f"q{i}", "who was born " * (i % 4) + f"in {i}", ("x",))
        for i in range(count)
    ]


def make_host(protocol=LETTERS, search=search, limits=LIMITS):
    """Return a Host with the tiny tokenizer."""
    return Host(tokenizer(), protocol, search, limits)


class WatchedSampler(Sampler):
    """A Sampler that records its last rows and the number of prompts it has read."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rows = None
        self.num_read = 0  # number of prompts
        prefill, decode, extend = self.prefill, self.decode, self.extend

        def watched_prefill(params, tokens, count):
            self.num_read += int(np.sum(np.asarray(count) > 1))
            return prefill(params, tokens, count)

        def watched(function):
            def call(*args):
                rows = function(*args)
                self.rows = jax.tree.map(np.array, rows)
                return rows

            return call

        self.prefill = watched_prefill
        self.decode, self.extend = watched(decode), watched(extend)


def make_sampler(
    *,
    protocol=LETTERS,
    limits=LIMITS,
    temperature=1.0,
    top_p=1.0,
    mesh=None,
    chunk=5,
    num_slots=None,
    page_tokens=1,
    dtype=jnp.float32,
    **changes,
):
    """Return a WatchedSampler of the tiny model."""
    if num_slots is None:
        num_slots = conversation_tokens(limits, markup_tokens(tokenizer(), protocol))
    return WatchedSampler(
        model(**changes).clone(dtype=dtype),
        mesh or make_mesh(devices=jax.devices()[:1]),
        stop_table=token_automaton(protocol.stop_strings, tokenizer().token_bytes),
        eos_ids=tokenizer().eos_ids,
        num_slots=num_slots,
        max_turn_tokens=limits.max_turn_tokens,
        chunk=chunk,
        temperature=temperature,
        top_p=top_p,
        page_tokens=page_tokens,
    )


@dataclasses.dataclass
class Setup:
    """An engine, its parts, and the parameters placed for it."""

    engine: RolloutEngine
    sampler: WatchedSampler
    host: Host
    params: dict

    def roll_out(self, batch, seed=0):
        """Return the groups of these questions."""
        return self.engine(self.params, batch, jax.random.key(seed))


def make_engine(
    *,
    num_rows=8,
    group_size=4,
    search=search,
    limits=LIMITS,
    seed=0,
    cache_tokens=0,
    **settings,
):
    """Return the Setup of an engine with the tiny model."""
    host = make_host(search=search, limits=limits)
    sampler = make_sampler(limits=limits, **settings)
    engine = RolloutEngine(
        sampler,
        host,
        num_rows=num_rows,
        group_size=group_size,
        cache_tokens=cache_tokens,
    )
    return Setup(engine, sampler, host, engine.place_params(params(seed)))


def row_of(rollout):
    """Return [n] ids of the whole conversation."""
    return np.concatenate([s.token_ids for s in rollout.segments])


def full_logits(tokens, seed=0):
    """Return [n, V] float32 logits of one forward pass over [n] ids."""
    # Padded, so that few lengths are compiled. Tokens do not attend to later ones.
    padded = np.pad(np.asarray(tokens), (0, -len(tokens) % 64))[None]
    positions = np.arange(padded.shape[1])[None]
    return np.asarray(_forward(params(seed), padded, positions)[0, : len(tokens)])


@jax.jit
def _forward(weights, tokens, positions):
    hidden, _ = model().apply({"params": weights}, tokens, positions)
    return model().apply({"params": weights}, hidden, method="logits")


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def sorted_nucleus(logits, top_p):
    """Return [V] float64 log-probs of the smallest set with mass >= top_p, by sorting.

    Tokens that are as likely as the least likely one of the set are in it as well.
    """
    p = np.exp(log_softmax(logits))
    descending = np.sort(p)[::-1]
    last = descending[np.searchsorted(np.cumsum(descending), top_p)]
    in_nucleus = p >= last * (1 - 1e-9)
    with np.errstate(divide="ignore"):
        return np.log(np.where(in_nucleus, p, 0) / p[in_nucleus].sum())
