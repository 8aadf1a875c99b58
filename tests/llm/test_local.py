"""A local model that answers chats in order, each independently of the others."""

import copy

import jax
import numpy as np
import pytest

from rsearch.llm import local
from rsearch.llm.local import local_generator
from rsearch.models.sharding import make_mesh
from tests.rollout import tiny

PROMPT, REPLY = 40, 6


def chat(text):
    return [{"role": "user", "content": text}]


def make(num_rows=2, tokenizer=None, devices=1, **settings):
    return local_generator(
        tiny.model(),
        tiny.params(),
        tokenizer or tiny.tokenizer(),
        make_mesh(devices=jax.devices()[:devices]),
        num_rows=num_rows,
        max_prompt_tokens=PROMPT,
        max_reply_tokens=REPLY,
        **settings,
    )


@pytest.fixture(scope="module")
def generate():
    return make()


CHATS = [chat(f"who was born in {word}") for word in ("river", "the city", "x", "")]
LONG = chat("who " * 50)


def greedy(messages):
    """Return [REPLY] greedy ids, by one full forward pass for each."""
    ids = tiny.tokenizer().encode_prompt(messages).tolist()
    for _ in range(REPLY):
        ids.append(int(np.argmax(tiny.full_logits(ids)[-1])))
    return ids[-REPLY:]


def test_replies_are_the_greedy_continuations_in_order(generate):
    replies = generate(CHATS)
    assert len(set(replies)) > 1
    assert replies == [tiny.tokenizer().decode(greedy(c)) for c in CHATS]


def test_a_reply_does_not_depend_on_the_other_chats(generate):
    in_one_call = generate(CHATS)
    assert [generate([c])[0] for c in CHATS] == in_one_call
    assert make(num_rows=3)(CHATS[::-1]) == in_one_call[::-1]


def test_no_chats_give_no_replies(generate):
    assert generate([]) == []


def test_a_chat_that_is_too_long_has_no_reply_and_the_others_have_theirs(generate):
    chats_asked = [LONG, CHATS[0], LONG, LONG, CHATS[1], LONG]
    first, second = generate(CHATS[:2])
    assert generate(chats_asked) == [None, first, None, None, second, None]
    assert generate([LONG]) == [None]


class Speaking:
    """A tokenizer whose decoded replies are the given texts, one after the other."""

    def __init__(self, replies, opening=""):
        self._inner, self._replies = tiny.tokenizer(), iter(replies)
        self._opening = opening

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def decode(self, ids):
        is_prompt = len(ids) > REPLY
        return f"user: <think>\n{self._opening}" if is_prompt else next(self._replies)


@pytest.mark.fault(74, "local model")
def test_a_local_models_thoughts_are_left_out_as_an_endpoints_are():
    said = []
    words = ["<think>x</think> Paris", "<think>x", "x</think>", " ", "Paris"]
    speaking = Speaking(words, opening="assistant: ")
    ask = make(num_rows=1, tokenizer=speaking, name="judge", log=said.append)
    chats = [chat(f"who is {i}, of the river and the city") for i in range(5)]
    assert ask(chats) == ["Paris", None, None, None, "Paris"]
    (line,) = said
    assert "judge" in line and "3 of 5" in line


@pytest.mark.fault(74, "local model")
def test_a_chat_template_may_open_the_thought():
    speaking = Speaking(["x", "x</think>Paris"], opening="assistant: <think>\n")
    ask = make(num_rows=1, tokenizer=speaking, log=lambda _: None)
    chats = [chat(f"who is {i}, of the river and the city") for i in range(2)]
    assert ask(chats) == [None, "Paris"]


def test_a_chat_of_exactly_the_budget_is_answered(generate):
    tokenizer = tiny.tokenizer()
    words = PROMPT - len(tokenizer.encode_prompt(chat("")))
    text = "a" * words
    assert len(tokenizer.encode_prompt(chat(text))) == PROMPT
    assert isinstance(generate([chat(text)])[0], str)
    assert generate([chat(text + "a")]) == [None]


def test_the_end_of_text_token_ends_a_reply_and_is_not_part_of_it():
    tokenizer = copy.copy(tiny.tokenizer())
    generated = greedy(CHATS[0])
    tokenizer.eos_ids = (generated[2],)
    end = generated.index(generated[2])
    (reply,) = make(tokenizer=tokenizer)([CHATS[0]])
    assert reply == tokenizer.decode(generated[:end])


def test_a_model_sharded_over_devices_gives_the_same_replies(generate):
    spread = make(num_rows=4, devices=4)
    # These share the first of two chunks.
    shared = [chat(f"{'river lies ' * 8}{word}") for word in "abc"]
    assert spread(CHATS + shared) == generate(CHATS + shared)


def test_hosts_that_share_a_model_may_have_a_single_chat(generate):
    """This host has four shards, and each needs a row."""
    shared = make(num_rows=16, devices=4, is_shared=True)
    assert shared(CHATS[:1]) == generate(CHATS[:1])


def test_a_sharded_model_reads_little_padding(generate, monkeypatch):
    """Each shard reads for its own rows, in calls of all shards."""
    calls = []

    class Recording(local.Sampler):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            extend = self.extend

            def record(params, rows, slots, *others):
                calls.append(slots.reshape(2, -1))
                return extend(params, rows, slots, *others)

            self.extend = record

    monkeypatch.setattr(local, "Sampler", Recording)
    shared = [chat(f"{'river lies ' * 8}{word}") for word in "abcdefghi"]
    spread = make(num_rows=16, devices=2)
    assert spread(shared) == generate(shared)
    read = [np.sort(rows[rows < 16]).tolist() for rows in np.concatenate(calls, 1)]
    assert read == [list(range(8)), [8]]
    assert [rows.shape for rows in calls] == [(2, 8)]


@pytest.fixture(scope="module")
def draw():
    return make(num_rows=8, temperature=3.0, seed=1)


def test_a_sampled_reply_depends_only_on_its_chat(draw):
    in_one_call = draw(CHATS)
    assert len(set(in_one_call)) == len(CHATS)
    assert [draw([c])[0] for c in CHATS] == in_one_call
    assert draw([LONG, *CHATS[::-1]]) == [None, *in_one_call[::-1]]
    assert make(num_rows=3, temperature=3.0, seed=1)(CHATS) == in_one_call
    other = make(num_rows=8, temperature=3.0, seed=2)(CHATS)
    assert not set(other) & set(in_one_call)


def test_copies_of_a_chat_in_one_call_are_sampled_separately(draw):
    first, other, *rest = draw([CHATS[0], CHATS[1], *CHATS[:1] * 5])
    assert len({first, *rest}) > 3
    assert draw(CHATS[:2]) == [first, other]
    assert draw(CHATS[:1] * 12)[:6] == [first, *rest]


def test_samples_follow_the_truncated_distribution(draw):
    """With a tiny top_p or temperature, only the likeliest token is left."""
    likeliest = [tiny.tokenizer().decode(greedy(c)) for c in CHATS]
    for settings in ({"top_p": 1e-6, "temperature": 1.0}, {"temperature": 1e-4}):
        assert make(**settings, seed=3)(CHATS) == likeliest
