"""Completions with stop strings, scores, and mixtures of prompts, by a local model."""

import jax
import numpy as np
import pytest

from rsearch.llm.local import LocalModel
from rsearch.llm.requests import (
    CUT,
    STOPPED,
    Generate,
    Mix,
    Score,
    TextWithMarkers,
    in_order,
    token_pieces,
)
from rsearch.models.sharding import make_mesh
from rsearch.rollout.sampling import sample_mixtures
from rsearch.runtime import console
from tests.rollout import tiny

PROMPT, REPLY = 40, 12
TEXTS = ["who was born", "river lies", "the city film", "x", "director company", "a"]


def make(num_rows=4, **settings):
    model = LocalModel(
        tiny.model(),
        tiny.tokenizer(),
        make_mesh(devices=jax.devices()[:1]),
        num_rows=num_rows,
        max_prompt_tokens=PROMPT,
        max_reply_tokens=REPLY,
        **settings,
    )
    model.load(tiny.params())
    return model


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture(scope="module")
def small():
    return make(num_rows=2)


@pytest.fixture(scope="module")
def sampling():
    """Return a model that samples its tokens."""
    return make(temperature=3.0, top_p=0.9)


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def greedy(ids, size=REPLY):
    """Return [size] greedy ids, by one full forward pass for each."""
    ids = list(ids)
    for _ in range(size):
        ids.append(int(np.argmax(tiny.full_logits(ids)[-1])))
    return ids[-size:]


def test_each_completion_ends_at_its_own_stop_string(model):
    free = in_order(model.generate([Generate(text, REPLY) for text in TEXTS]))
    assert [c.end for c in free] == [CUT] * len(TEXTS)
    # Two characters in the middle of each reply; they may span two tokens.
    stops = [c.text[len(c.text) // 2 :][:2] for c in free]
    mixed = [Generate(t, REPLY, (s,)) for t, s in zip(TEXTS, stops, strict=True)]
    mixed[1:1] = [Generate(TEXTS[0], REPLY)]
    first, alone, *others = in_order(model.generate(mixed))
    assert alone.text == free[0].text
    for stopped, whole, stop in zip([first, *others], free, stops, strict=True):
        assert stopped.end == STOPPED
        assert stopped.text == whole.text[: whole.text.index(stop)]
        assert "".join(stopped.tokens) == stopped.text
        assert len(stopped.ids) <= len(whole.ids)
    assert in_order(model.generate([Generate(TEXTS[0], 3)]))[0].ids.tolist() == greedy(
        tiny.tokenizer().encode_raw(TEXTS[0]), 3
    )


def test_stop_strings_are_copied_to_the_devices_once(model, monkeypatch):
    """Their table has a column for each id of the vocabulary."""
    tables, decode = [], model._sampler.decode

    def record(params, rows, key, request):
        tables.append(request.stop_table)
        return decode(params, rows, key, request)

    monkeypatch.setattr(model._sampler, "decode", record)
    for stop in ("e", "e", "new", "e"):
        in_order(model.generate([Generate("who", 2, (stop,))]))
    first, same, new, last = tables
    assert isinstance(first, jax.Array) and first is same
    assert new is not first and last is new


def test_completions_depend_on_neither_batch_size_nor_order(model, small):
    requests = [Generate(t, REPLY, (("e",), ())[i % 2]) for i, t in enumerate(TEXTS)]
    expected = [c.text for c in in_order(model.generate(requests))]
    assert [c.text for c in in_order(small.generate(requests[::-1]))] == expected[::-1]


@pytest.mark.parametrize("name", ["model", "sampling"])
def test_log_probabilities_are_those_of_the_tokens_written(name, request):
    asked = Generate(TEXTS[0], REPLY, wants_logp=True)
    beside = Generate(TEXTS[1], REPLY)
    free, other = in_order(request.getfixturevalue(name).generate([asked, beside]))
    assert len(other.ids) and not len(other.logp)
    ids = free.prompt_ids.tolist() + free.ids.tolist()
    start = len(free.prompt_ids)
    expected = [
        log_softmax(tiny.full_logits(ids[:i])[-1])[ids[i]]
        for i in range(start, len(ids))
    ]
    assert free.logp == pytest.approx(expected, abs=1e-4)
    assert len(free.tokens) == len(free.logp)


def test_prompts_with_a_shared_prefix_are_answered_as_each_is_alone(model, small):
    """The prompts are longer than a chunk, and share its 24 tokens."""
    first, second = "who was born in the river " * 3, "the city film director " * 4
    texts = [f"{first}a", f"{second}x", f"{first}the", f"{first}lies", second]
    tokenizer = tiny.tokenizer()
    assert all(24 < len(tokenizer.encode_raw(text)) <= PROMPT for text in texts)
    requests = [Generate(text, REPLY, wants_logp=True) for text in texts]
    alone = [in_order(small.generate([request]))[0] for request in requests]
    for asked, answers in (
        (requests, alone),
        (requests[::-1], alone[::-1]),
        (requests[3:4], alone[3:4]),
    ):
        for completion, other in zip(
            in_order(model.generate(asked)), answers, strict=True
        ):
            np.testing.assert_array_equal(completion.ids, other.ids)
            assert completion.logp == pytest.approx(other.logp, abs=1e-5)


def test_a_prompt_is_read_from_where_it_differs_from_an_earlier_one(
    model, small, monkeypatch
):
    """Requests are added while others are answered, as a method's next steps are."""
    num_read = []

    def extend(params, rows, targets, tokens, count):
        num_read.append(int(count[targets < 4].sum()))
        return sampler_extend(params, rows, targets, tokens, count)

    sampler_extend = model._sampler.extend
    monkeypatch.setattr(model._sampler, "extend", extend)
    starts = ["company river " * 6, "x lies in the film " * 4]
    requests = [Generate(text, REPLY, wants_logp=True) for text in starts]
    completions = {}
    for results in model.generate(requests):
        for i, completion in results:
            completions[i] = completion
            if i < 4:
                text = f"{requests[i].prompt}a"
                requests.append(Generate(text, REPLY, wants_logp=True))
    assert len(completions) == len(requests) == 6
    for i, completion in completions.items():
        (alone,) = in_order(small.generate(requests[i : i + 1]))
        np.testing.assert_array_equal(completion.ids, alone.ids)
        assert completion.logp == pytest.approx(alone.logp, abs=1e-5)
    sizes = [len(completions[i].prompt_ids) for i in range(6)]
    assert min(sizes) > 24 and max(sizes) <= PROMPT
    assert sum(num_read) == sum(sizes[2:]) - 4 * 24  # a chunk of 24 is not read again


def test_a_completion_ends_once_it_is_enough(model, small):
    free = in_order(model.generate([Generate(text, REPLY) for text in TEXTS]))
    sizes = [len(c.text) // (i + 1) for i, c in enumerate(free)]
    requests = [
        Generate(t, REPLY, is_enough=lambda text, size=size: len(text) >= size)
        for t, size in zip(TEXTS, sizes, strict=True)
    ]
    requests[2:2] = [Generate(TEXTS[0], REPLY)]
    for asks in (model, small):
        first, second, beside, *others = in_order(asks.generate(requests))
        assert beside.text == free[0].text
        for cut, whole, size in zip([first, second, *others], free, sizes, strict=True):
            assert cut.end == CUT
            assert cut.ids.tolist() == whole.ids[: len(cut.ids)].tolist()
            assert len(cut.text) >= size
            assert len("".join(cut.tokens[:-1])) < size or not cut.tokens


def test_a_chat_continues_the_text_that_the_assistant_has_begun(model):
    chat = [{"role": "user", "content": "who"}]
    whole, went_on = in_order(
        model.generate(
            [Generate(chat, REPLY), Generate(chat, 4, continued="the river")]
        )
    )
    tokenizer = tiny.tokenizer()
    ids = [*tokenizer.encode_prompt(chat), *tokenizer.encode("the river")]
    assert went_on.prompt_ids.tolist() == ids
    assert whole.prompt_ids.tolist() == ids[: len(whole.prompt_ids)]
    control = "<|im_end|>"
    (safe,) = in_order(model.generate([Generate(chat, 4, continued=control)]))
    added = safe.prompt_ids[len(whole.prompt_ids) :].tolist()
    assert len(added) > 1 and not tokenizer.control_ids & set(added)


def test_only_marks_become_control_tokens(model):
    tokenizer, mark = tiny.tokenizer(), "<|user|>"
    (control,) = tokenizer.encode_inner(mark, is_mark=True).tolist()
    spelt = tokenizer.encode(mark).tolist()
    prompt = TextWithMarkers(("who", mark, f"the {mark}", f"{mark} x"))
    (reply,) = in_order(model.generate([Generate(prompt, 2)]))
    expected = [*tokenizer.encode("who"), control]
    expected += [*tokenizer.encode("the "), *spelt, control, *tokenizer.encode(" x")]
    assert reply.prompt_ids.tolist() == expected and control not in spelt
    as_mark, as_text = model.score(
        [Score(prompt, mark, is_mark=True), Score(prompt, mark)]
    )
    assert as_mark.num_read == len(expected) + 1
    assert as_text.num_read == len(expected) + len(spelt)
    logits = tiny.full_logits(expected)[-1]
    assert as_mark.logp == pytest.approx([log_softmax(logits)[control]], abs=1e-4)


def test_scores_are_those_of_the_full_forward_pass(model):
    tokenizer = tiny.tokenizer()
    pairs = [("who was", " born in the"), ("", "river city"), ("a" * 20, "b" * 30)]
    scored = model.score([Score(*pair) for pair in pairs])
    for (prefix, text), result in zip(pairs, scored, strict=True):
        first = tokenizer.encode_raw(prefix).tolist() or [tokenizer.eos_ids[0]]
        ids = [*first, *tokenizer.encode(text)]
        expected = [
            log_softmax(tiny.full_logits(ids[:i])[-1])[ids[i]]
            for i in range(len(first), len(ids))
        ]
        assert result.logp == pytest.approx(expected, abs=1e-4)
        assert "".join(result.tokens) == text and result.num_read == len(ids)
    assert model.score([Score("", "a" * 60)]) == [None]


def test_the_progress_of_many_texts_is_shown(model, monkeypatch, capsys):
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", -1.0)
    model.score([Score("", "who")] * 6)  # three at once
    shown = capsys.readouterr().err
    assert "scored 3 of 6 texts" in shown and "scored 6 of 6 texts" in shown
    in_order(model.generate([Generate("who", 2)] * 6))
    assert "written 6 of 6 replies" in capsys.readouterr().err


def test_a_mixture_of_one_prompt_is_its_greedy_completion(model):
    mixes = [Mix((text,), (1.0,), REPLY) for text in TEXTS]
    alone = in_order(model.generate([Generate(text, REPLY) for text in TEXTS]))
    mixed = in_order(model.mix(mixes))
    assert [c.ids.tolist() for c in mixed] == [c.ids.tolist() for c in alone]


def test_a_mixture_takes_the_likeliest_token_of_the_weighted_probabilities(model):
    tokenizer, weights = tiny.tokenizer(), (0.6652, 0.2447, 0.0901)
    mix = Mix(tuple(TEXTS[:3]), weights, 5)
    rows = [tokenizer.encode_raw(text).tolist() for text in mix.prompts]
    expected = []
    for _ in range(5):
        probs = [np.exp(log_softmax(tiny.full_logits(row)[-1])) for row in rows]
        token = int(np.argmax(sum(w * p for w, p in zip(weights, probs, strict=True))))
        expected.append(token)
        rows = [[*row, token] for row in rows]
    # Together with other mixtures, in more than one batch.
    results = in_order(model.mix([mix, Mix(("x", "a"), (0.5, 0.5), 5), mix]))
    assert results[0].ids.tolist() == results[2].ids.tolist() == expected
    assert len(results[0].prompt_ids) == sum(len(r) - 5 for r in rows)


def test_probabilities_are_averaged_not_their_logarithms():
    """Vectors of REPLUG; in the second, the mean of logarithms would choose token 1."""
    for weights, probs, token in (
        (
            [0.6652, 0.2447, 0.0900],
            [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]],
            0,
        ),
        ([0.5, 0.5], [[0.90, 0.0999, 0.0001], [0.0001, 0.50, 0.4999]], 0),
        ([0.2, 0.8], [[0.90, 0.0999, 0.0001], [0.0001, 0.50, 0.4999]], 1),
    ):
        group, keys = np.zeros(len(probs), np.int32), keys_of(len(probs))
        mixed = np.log(probs), group, np.log(weights), keys, 0
        assert sample_mixtures(*mixed, temperature=0.0, top_p=1.0)[0] == token


def keys_of(num):
    return jax.random.split(jax.random.key(1), num)


@pytest.mark.parametrize(
    ("weights", "probs", "mixture"),
    [
        ([0.25, 0.75], [[0.8, 0.2, 0.0], [0.1, 0.3, 0.6]], [0.275, 0.275, 0.45]),
        # Vectors of REPLUG. A port's mean of logits has 0.4671, 0.4053 and 0.1276.
        (
            [0.6652, 0.2447, 0.0900],
            [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]],
            [0.5081, 0.3468, 0.1450],
        ),
        (
            [0.5, 0.5],
            [[0.90, 0.0999, 0.0001], [0.0001, 0.50, 0.4999]],
            [0.4501, 0.2999, 0.2500],
        ),
    ],
)
def test_samples_of_a_mixture_have_its_probabilities(weights, probs, mixture):
    assert np.average(probs, 0, weights) == pytest.approx(mixture, abs=2e-4)
    num, size = 4000, len(weights)
    # Its rows form a group. There must be a key for each row; some are padding.
    logits = np.log(np.tile(probs, (num, 1)) + 1e-30)
    group = np.repeat(np.arange(num, dtype=np.int32), size)
    mixed = logits, group, np.log(np.tile(weights, num)), keys_of(size * num), 0
    drawn = sample_mixtures(*mixed, temperature=1.0, top_p=1.0)[:num]
    shares = np.bincount(drawn, minlength=3) / num
    assert shares == pytest.approx(mixture, abs=0.025)


def test_a_sample_depends_only_on_its_prompt_and_draw(sampling):
    draws = [(seed, sample) for seed in (1, 2) for sample in (0, 1)]
    requests = [Generate(t, REPLY, draw=d) for t in TEXTS[:2] for d in draws]
    mixes = [Mix((r.prompt, "x"), (0.5, 0.5), REPLY, draw=r.draw) for r in requests]
    for ask, several in ((sampling.generate, requests), (sampling.mix, mixes)):
        texts = [c.text for c in in_order(ask(several))]
        assert len(set(texts)) == len(several)
        assert [c.text for c in in_order(ask(several[::-1]))] == texts[::-1]
        assert [c.text for c in in_order(ask(several[3:6]))] == texts[3:6]


def test_an_empty_prompt_is_continued_from_the_end_of_text_token(model):
    expected = greedy([tiny.tokenizer().eos_ids[0]], 5)
    (completion,) = in_order(model.generate([Generate("", 5)]))
    (mixed,) = in_order(model.mix([Mix(("",), (1.0,), 5)]))
    assert completion.ids.tolist() == mixed.ids.tolist() == expected


def test_a_prompt_that_does_not_fit_has_no_completion(model):
    long = "a" * (PROMPT + 1)
    assert in_order(model.generate([Generate(long, 4)])) == [None]
    assert in_order(model.mix([Mix((long, "a"), (0.5, 0.5), 4)])) == [None]
    with pytest.raises(ValueError, match="mixture of 5 prompts, but 4"):
        in_order(model.mix([Mix(("a",) * 5, (0.2,) * 5, 4)]))


def test_pieces_add_up_to_the_text_even_if_tokens_split_characters():
    raw = [b"a", "é".encode()[:1], "é".encode()[1:] + b"b", b"\xf0\x9f"]
    pieces = token_pieces(raw)
    assert pieces == ("a", "", "éb", "\ufffd")
    assert "".join(pieces) == b"".join(raw).decode("utf-8", "replace")
    assert token_pieces([]) == ()
