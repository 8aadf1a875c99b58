"""A tokenizer learned from a small text: words are tokens, any text round-trips."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.models.small_tokenizer import ROLES, train_tokenizer
from rsearch.protocols.base import Step
from rsearch.tools.search import search_call
from rsearch.world.texts import WORLD_PROTOCOLS, world_words
from rsearch.world.world import make_world
from tests.small_run import run_python

TAGS = ("<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>")
FRAME = ["\n\n<information>Doc 1(Title: ) </information>\n\n", "Invalid. Try again."]


def make():
    world = make_world(
        seed=3,
        people=60,
        films=60,
        companies=20,
        cities=20,
        train_questions=150,
        dev_questions=20,
    )
    return world, train_tokenizer(world.texts() + world_words(world) + 2 * FRAME)


@pytest.fixture(scope="module")
def made():
    return make()


@pytest.fixture(scope="module")
def tokenizer(made):
    return made[1]


FINGERPRINT = """
from tests.models.test_small_tokenizer import make
print(make()[1].fingerprint)
"""


@pytest.mark.parametrize(
    ("threads", "seed"), [("4", "2"), pytest.param("1", "1", marks=pytest.mark.slow)]
)
def test_every_process_learns_the_same_tokenizer(tokenizer, threads, seed):
    environment = dict(RAYON_NUM_THREADS=threads, PYTHONHASHSEED=seed)
    done = run_python("-c", FINGERPRINT, **environment)
    assert done.stdout.strip() == tokenizer.fingerprint, done.stderr


def test_a_tag_is_one_token_wherever_it_stands(tokenizer):
    for tag in (*TAGS, "<information>", "</information>"):
        (token,) = tokenizer.encode(tag)
        for around in (" {} ", "x{}y", "<{}>", "{}{}"):
            text = around.replace("{}", tag)
            assert token in tokenizer.encode(text), text


def test_the_markup_of_every_protocol_of_the_world_is_few_tokens(made):
    """A small model then has little to write besides the words of a turn."""
    world, tokenizer = made
    query = world.hops[world.train[0].id][0].subject
    for name, protocol in WORLD_PROTOCOLS.items():
        (opened,) = tokenizer.encode(name)
        assert tokenizer.decode([opened]) == name
        turn = protocol.write(Step(1, "Born in?", search_call(query)))
        plain = tokenizer.encode(f" Born in? {query}")
        assert len(tokenizer.encode(turn)) <= len(plain) + 8, turn


def test_a_word_of_the_training_text_and_the_space_before_it_are_one_token(made):
    """This includes heads of held-out questions, whose passages are in the text."""
    world, tokenizer = made
    texts = [p.text for p in world.passages] + [q.text for q in world.train]
    words = {word.strip("?.") for text in texts for word in text.split()[1:]}
    long = [w for w in sorted(words) if len(tokenizer.encode(f" {w}")) != 1]
    # Words that occur once are not worth a token; a title has no space before it.
    learned = world.texts() + world_words(world)
    often = [w for w in long if sum(text.count(f" {w}") for text in learned) > 1]
    assert often == []


def test_the_chat_is_framed_by_control_tokens(tokenizer):
    chat = [{"role": "system", "content": "be"}, {"role": "user", "content": "So?"}]
    ids = tokenizer.encode_prompt(chat).tolist()
    assert tokenizer.decode(ids) == "<|system|>be<|user|>So?<|assistant|>"
    control = [i for i in ids if i in tokenizer.control_ids]
    assert tokenizer.decode(control) == "<|system|><|user|><|assistant|>"
    assert tokenizer.decode(tokenizer.eos_ids) == "<|end|>"


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text):
    tokenizer = small()
    kept = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == kept


@given(st.lists(st.sampled_from([*TAGS, *ROLES, "<", ">", "/", " ", "\n", "a", "é"])))
def test_any_mixture_of_tags_survives_and_holds_no_control_token(parts):
    tokenizer = small()
    ids = tokenizer.encode("".join(parts))
    assert tokenizer.decode(ids) == "".join(parts)
    assert tokenizer.control_ids.isdisjoint(ids.tolist())


_small = []


def small():
    """Return one tokenizer for all examples of a property."""
    if not _small:
        _small.append(train_tokenizer(["who <think> <search> was born"] * 2))
    return _small[0]


def test_an_unknown_text_is_encoded_byte_by_byte():
    tokenizer = train_tokenizer(["a"])
    assert tokenizer.vocab_size == 256 + len(ROLES)
    assert len(tokenizer.encode("日本")) == 6
    assert tokenizer.decode(tokenizer.encode("日本")) == "日本"


def test_the_vocabulary_is_not_larger_than_asked_for():
    texts = [f"word{chr(97 + i % 26)}{chr(97 + i // 26)} " * 2 for i in range(600)]
    assert train_tokenizer(texts, vocab_size=300).vocab_size == 300
