"""A model at an endpoint for methods: what it is sent, and how replies are read."""

import json
import math

import numpy as np
import pytest

from rsearch.llm.remote_model import RemoteModel
from rsearch.llm.requests import (
    CUT,
    STOPPED,
    Failure,
    Generate,
    Mix,
    Score,
    TextWithMarkers,
    in_order,
)
from tests.llm.test_endpoint import serving
from tests.rollout import tiny

CHAT = [{"role": "user", "content": "Who? \ud83d"}]


def asking(url, **changed):
    settings = dict(
        api_key_env="",
        temperature=0.0,
        top_p=1.0,
        timeout_seconds=5.0,
        max_retries=0,
        concurrency=4,
        first_wait_seconds=0.01,
        field="config.models.subject.source",
        log=lambda line: None,
    )
    return RemoteModel(url, "m", **settings | changed)


def choice(end="stop", said=None, usage=None, **fields):
    """Return (status, body, headers) of a reply whose choice has these fields."""
    if said is not None:
        fields["message"] = {"role": "assistant", "content": said}
    choices = [{"index": 0, "finish_reason": end, **fields}]
    return 200, json.dumps({"choices": choices, "usage": usage}).encode(), {}


def ask(answer, *requests, **changed):
    """Return (completions, calls received) of an endpoint that gives this answer."""
    with serving(lambda number, body: answer) as endpoint:
        completions = in_order(asking(endpoint.url, **changed).generate(requests))
    return completions, endpoint.requests


def token(text, logp, raw=None):
    return {"token": text, "logprob": logp, "bytes": raw}


def test_a_chat_is_sent_with_the_text_that_continues_it():
    request = Generate(CHAT, 8, ("</s>", "\n"), continued="So far")
    (completion,), ((path, body),) = ask(choice(said=" Bo"), request)
    assert path == "/v1/chat/completions" and completion.text == " Bo"
    assert body == {
        "model": "m",
        "temperature": 0.0,
        "top_p": 1.0,
        "stream": False,
        "max_tokens": 8,
        "stop": ["</s>", "\n"],
        "messages": [
            {"role": "user", "content": "Who? \N{REPLACEMENT CHARACTER}"},
            {"role": "assistant", "content": "So far"},
        ],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert "Who?" in completion.prompt_text and "So far" in completion.prompt_text
    assert len(completion.ids) == len(completion.prompt_ids) == 0


def test_each_sample_is_sent_with_a_seed_of_its_own():
    draws = [(), (), (1, 0), (1, 1), (2, 0), (1, 0)]
    requests = [Generate("Q:", 8, draw=draw) for draw in draws]

    def seeds():
        _, sent = ask(choice(text=" Bo"), *requests, concurrency=1)
        return [body.get("seed") for _, body in sent]

    none, others = seeds()[:2], seeds()[2:]
    assert none == [None] * 2 and len({*others}) == 4
    assert all(0 <= seed < 2**31 for seed in others) and seeds()[2:] == others


def test_a_raw_text_is_sent_as_it_is():
    answer = choice("length", text=" Bo")
    (completion,), ((path, body),) = ask(answer, Generate("Q:", 8))
    assert path == "/v1/completions" and body["prompt"] == "Q:"
    assert not {"messages", "stop", "logprobs"} & body.keys()
    assert (completion.text, completion.end) == (" Bo", CUT)


@pytest.mark.parametrize(
    ("answer", "text", "end", "stop"),
    [
        (choice(said="a"), "a", STOPPED, None),
        (choice(said="a", stop_reason=None), "a", STOPPED, ""),
        (choice(said="a", stop_reason=151645), "a", STOPPED, ""),
        (choice(said="a", stop_reason="</x>"), "a", STOPPED, "</x>"),
        (choice(said="a", matched_stop="</y>"), "a", STOPPED, "</y>"),
        (choice(said="a", matched_stop=["</y>"]), "a", STOPPED, ""),
        (choice("length", said="a"), "a", CUT, ""),
        # An endpoint that continues after a stop string, or includes it.
        (choice("length", said="a</y>b</x>"), "a", STOPPED, "</y>"),
        (choice(said=""), "", STOPPED, None),
    ],
)
def test_a_completion_ends_before_a_stop_string_that_may_be_named(
    answer, text, end, stop
):
    (completion,), _ = ask(answer, Generate(CHAT, 8, ("</x>", "</y>")))
    assert (completion.text, completion.end, completion.stop) == (text, end, stop)


def test_log_probabilities_are_those_of_the_text():
    rows = [
        token("a", -0.5),
        token("?", -1, [0xC3]),
        token("?", -0.25, [0xA9]),
        token("<end>", -2.0),
    ]
    answer = choice(said="a\u00e9", logprobs={"content": rows})
    request = Generate(CHAT, 8, wants_logp=True)
    (completion,), ((_, body),) = ask(answer, request)
    assert body["logprobs"] is True and "".join(completion.tokens) == "a\u00e9"
    np.testing.assert_array_equal(completion.logp, np.float32([-0.5, -1, -0.25]))
    logprobs = {"tokens": ["x", "y"], "token_logprobs": [-1.0, -2.0]}
    answer = choice(text="xy", logprobs=logprobs)
    (completion,), ((_, body),) = ask(answer, Generate("Q", 8, wants_logp=True))
    assert body["logprobs"] == 1 and completion.tokens == ("x", "y")
    (completion,), _ = ask(choice(said="", logprobs={"content": []}), request)
    assert completion.tokens == () and completion.logp.shape == (0,)


def test_an_empty_text_needs_no_log_probabilities():
    """llama.cpp sends null if there is no token; other replies have theirs."""
    answer = choice(text="", logprobs=None)
    (completion,), _ = ask(answer, Generate("Q", 8, ("\n",), wants_logp=True))
    assert completion.text == "" and completion.logp.shape == (0,)


@pytest.mark.parametrize("logprobs", [None, 7, {}, {"content": None}, {"content": "a"}])
def test_an_endpoint_without_log_probabilities_is_named(logprobs):
    with pytest.raises(ValueError, match=r"models\.subject\.source.*log-probabilities"):
        ask(choice(said="a", logprobs=logprobs), Generate(CHAT, 8, wants_logp=True))


def test_a_single_reply_without_log_probabilities_is_a_failed_call():
    def behave(number, body):
        if body["messages"][0]["content"] in lacking and number < num_lacking:
            return choice(said="a")
        return choice(said="a", logprobs={"content": [token("a", -1.0)]})

    requests = [
        Generate([{"role": "user", "content": text}], 8, wants_logp=True)
        for text in ("0", "1")
    ]
    with serving(behave) as endpoint:
        model = asking(endpoint.url, concurrency=1, max_retries=1)
        lacking, num_lacking = ("1",), 9
        first, second = in_order(model.generate(requests))
        assert first.logp.tolist() == [-1.0] and isinstance(second, Failure)
        assert len(endpoint.requests) == 3  # the bad reply was asked for again
        # The endpoint gave some before, so a later one without is no reason to refuse.
        lacking = ("0",)
        assert isinstance(*in_order(model.generate(requests[:1])), Failure)
        num_lacking = 0
        assert in_order(model.generate(requests[:1]))[0].text == "a"


@pytest.mark.parametrize(
    "rows",
    [
        [token("a", 0.5)],
        [token("a", None)],
        [token("a", float("nan"))],
        [token("a", -1e300)],
        [token("a", True)],
        [token(7, -1.0)],
        [token("b", -1.0)],
        [7],
    ],
)
def test_impossible_log_probabilities_are_a_failed_call(rows):
    answer = choice(said="a", logprobs={"content": rows})
    (result,), _ = ask(answer, Generate(CHAT, 8, wants_logp=True))
    assert isinstance(result, Failure)


@pytest.mark.parametrize(
    "answer",
    [
        (400, b"too long", {}),
        (503, b"", {}),
        (200, b"[]", {}),
        (200, b'{"choices": [7]}', {}),
        (200, b'{"choices": [{"message": {"content": 7}}]}', {}),
        choice("content_filter", said="Par"),
        choice("abort", said="Par"),
        choice(message={"content": None, "refusal": "No."}),
    ],
)
def test_a_call_that_fails_for_good_gives_the_reason(answer):
    (result,), _ = ask(answer, Generate(CHAT, 8))
    assert isinstance(result, Failure) and result.reason


def test_a_thought_that_the_endpoint_truncates_is_a_cut_completion():
    message = {"content": None, "reasoning_content": "Hm"}
    (completion,), _ = ask(choice("length", message=message), Generate(CHAT, 8))
    assert (completion.text, completion.end) == ("", CUT)


USAGE = {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (USAGE, (7, 0)),
        (None, None),
        ([7, 0], None),
        ({"prompt_tokens": 7}, None),
        *(
            (USAGE | {"completion_tokens": hostile}, None)
            for hostile in (-1, 1.0, True, None, "3", [], math.nan, 10**18, 10**999)
        ),
    ],
)
def test_tokens_are_counted_as_the_endpoint_says_if_that_can_be(usage, counts):
    for request, fields in (
        (Generate(CHAT, 8), {"said": "Paris"}),
        (Generate("Who?", 8), {"text": "Paris"}),
    ):
        (completion,), _ = ask(choice(usage=usage, **fields), request)
        assert (completion.text, completion.endpoint_tokens) == ("Paris", counts)


def test_completions_keep_the_order_of_requests_and_no_requests_need_no_call():
    def behave(number, body):
        return choice(said=body["messages"][0]["content"])

    requests = [Generate([{"role": "user", "content": str(i)}], 8) for i in range(9)]
    with serving(behave) as endpoint:
        model = asking(endpoint.url)
        assert [c.text for c in in_order(model.generate(requests))] == list("012345678")
        assert in_order(model.generate([])) == [] and len(endpoint.requests) == 9
    assert model.on_any_host([1]) and not model.on_any_host([]) and model.num_rows == 4


def test_requests_that_an_endpoint_cannot_serve_are_refused_by_name():
    model = asking("http://127.0.0.1:9/v1")
    with pytest.raises(ValueError, match=r"subject\.source.*127.*mixtures of raw"):
        in_order(model.mix([Mix(("a",), (1.0,), 8)]))
    with pytest.raises(ValueError, match=r"subject\.source.*127.*samples of mixtures"):
        in_order(model.mix([Mix((CHAT,), (1.0,), 8, draw=(1,))]))
    with pytest.raises(ValueError, match=r"subject\.source.*127.*log-probabilities"):
        model.score([Score(CHAT, "a")])
    with pytest.raises(ValueError, match=r"subject\.source.*127.*control token"):
        in_order(model.generate([Generate(TextWithMarkers(("a", "b")), 8)]))


def named(probs, end="length", drawn=None, usage=None):
    """Return a reply of one token, with the probabilities of the likeliest tokens."""
    top = [token(text, math.log(p)) for text, p in probs.items()]
    row = {**(token(drawn, -1.0) if drawn else top[0]), "top_logprobs": top}
    return choice(end, said="", usage=usage, logprobs={"content": [row]})


def mixing(table, weights, max_tokens=4, **changed):
    """Return (completion, calls received) of a mixture of prompts "0", "1", ...

    Args:
        table: {text so far: the reply to each prompt}.
    """

    def behave(number, body):
        first, *so_far = body["messages"]
        return table[so_far[0]["content"] if so_far else ""][int(first["content"])]

    prompts = [[{"role": "user", "content": str(i)}] for i in range(len(weights))]
    with serving(behave) as endpoint:
        mix = Mix(tuple(prompts), weights, max_tokens)
        (completion,) = in_order(asking(endpoint.url, **changed).mix([mix]))
    return completion, endpoint.requests


def test_a_mixture_takes_the_token_of_the_greatest_weighted_probability():
    """The mean of log-probabilities would take "b" instead."""
    end = named({"<|eot_id|>": 0.9, "a": 0.1}, "stop")
    table = {
        "": [
            named({"b": 0.0999, "a": 0.90, "c": 0.0001}),
            named({"b": 0.50, "c": 0.4999, "a": 0.0001}),
        ],
        "a": [end, end],
    }
    said = []
    completion, sent = mixing(table, (0.5, 0.5), log=said.append)
    assert (completion.text, completion.end, said) == ("a", STOPPED, [])
    assert len(sent) == 4
    for _, body in sent:
        assert (body["max_tokens"], body["top_logprobs"]) == (1, 20)
        assert body["logprobs"] is True
    assert [body.get("continue_final_message") for _, body in sent[2:]] == [True] * 2


def test_a_mixture_at_an_endpoint_equals_one_over_the_whole_distribution():
    """The endpoint gives 20 tokens; the expected ones are computed from all of them."""
    tokenizer = tiny.tokenizer()

    def logp_behind(messages):
        texts = [tokenizer.encode_raw(m["content"]) for m in messages]
        return tiny.log_softmax(8 * tiny.full_logits(np.concatenate(texts))[-1])

    def behave(number, body):
        logp = logp_behind(body["messages"])
        top = [
            token("?", float(logp[i]), list(tokenizer.token_bytes[i]))
            for i in np.argsort(-logp)[:20]
        ]
        row = {**top[0], "top_logprobs": top}
        return choice("length", said="", logprobs={"content": [row]})

    texts, weights = ("who was born", "river lies", "the city film"), (0.5, 0.3, 0.2)
    prompts = tuple([{"role": "user", "content": text}] for text in texts)
    expected = b""
    for _ in range(5):
        so_far = [{"content": expected.decode()}] if expected else []
        rows = [np.exp(logp_behind([*prompt, *so_far])) for prompt in prompts]
        mean = sum(w * p for w, p in zip(weights, rows, strict=True))
        expected += tokenizer.token_bytes[int(np.argmax(mean))]
    with serving(behave) as endpoint:
        model = asking(endpoint.url)
        first, second = in_order(
            model.mix([Mix(prompts, weights, 5), Mix(prompts, weights, 2)])
        )
    assert first.text == expected.decode() and first.end == second.end == CUT
    assert len(first.tokens) == 5 and first.text.startswith(second.text)


@pytest.mark.parametrize(("last", "counts"), [(USAGE, (12, 2)), (None, None)])
def test_the_tokens_of_a_mixtures_prompts_are_counted_once(last, counts):
    first = USAGE | {"prompt_tokens": 5}
    table = {
        "": [named({"a": 0.9}, usage=first), named({"a": 0.9}, usage=last)],
        "a": [named({"b": 0.9}, usage=USAGE)] * 2,
    }
    completion, _ = mixing(table, (0.5, 0.5), max_tokens=2)
    assert (completion.text, completion.endpoint_tokens) == ("ab", counts)


def test_an_end_of_text_token_is_not_part_of_the_text():
    """If no prompt's sample ends with it, it is recognised by its form."""
    both = [named({"x": 0.6, "<|im_end|>": 0.4}), named({"y": 0.6, "<|im_end|>": 0.4})]
    completion, _ = mixing({"": both}, (0.5, 0.5))
    assert (completion.text, completion.end) == ("", STOPPED)
    other = [named({"#": 0.9}, "stop", drawn="#"), named({"#": 0.4, "y": 0.3})]
    completion, _ = mixing({"": other}, (0.5, 0.5))
    assert (completion.text, completion.end) == ("", STOPPED)


def test_tokens_that_missing_probabilities_might_change_are_counted():
    said = []
    close = [named({"x": 0.5, "z": 0.3}), named({"y": 0.45, "z": 0.3})]
    completion, _ = mixing({"": close}, (0.5, 0.5), max_tokens=1, log=said.append)
    # "x" has 0.25, and up to 0.125 more from the second prompt's tail: above 0.3.
    assert completion.text == "z" and len(said) == 1 and "1 of 1 tokens" in said[0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((503, b"", {}), "503"),
        (choice("length", said="", logprobs={"content": []}), "end"),
        (named({"a": 0.9}, "content_filter"), "filtered"),
        (choice("length", said="", logprobs={"content": [{"top_logprobs": [7]}]}), ""),
        (
            choice(
                "length",
                said="",
                logprobs={
                    "content": [
                        {
                            **token("?", -1.0, [0xC3]),
                            "top_logprobs": [token("?", -0.1, [0xC3])],
                        }
                    ]
                },
            ),
            "character",
        ),
    ],
)
def test_a_mixture_fails_if_one_of_its_calls_fails(answer, words):
    fine = named({"a": 0.5, "b": 0.2})
    completion, _ = mixing({"": [fine, answer]}, (0.1, 0.9))
    assert isinstance(completion, Failure) and words in completion.reason


@pytest.mark.parametrize(
    "logprobs", [None, {}, {"content": None}, {"content": [{"token": "a"}]}]
)
def test_an_endpoint_that_gives_no_likeliest_tokens_is_refused(logprobs):
    with pytest.raises(ValueError, match="list of the 20 likeliest next tokens"):
        mixing({"": [choice("length", said="a", logprobs=logprobs)]}, (1.0,))


def test_a_mixture_fails_if_a_later_reply_names_no_likeliest_tokens():
    lacking = choice("length", said="a", logprobs=None)
    table = {"": [named({"a": 0.5})], "a": [lacking]}
    completion, _ = mixing(table, (1.0,))
    assert isinstance(completion, Failure) and "log-prob" in completion.reason


def test_a_refusing_endpoint_is_reported_at_the_start():
    with (
        serving(lambda number, body: (404, b"no such model", {})) as endpoint,
        pytest.raises(ValueError, match=r"models\.subject\.source.*no such model"),
    ):
        asking(endpoint.url).check()
    with serving(lambda number, body: choice("length", said="He")) as endpoint:
        asking(endpoint.url).check()
    assert len(endpoint.requests) == 1
