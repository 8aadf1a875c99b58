"""A model at an OpenAI-compatible endpoint that answers the requests of methods.

Such an endpoint continues one prompt at a time. It scores no texts; a model that runs
here may do that for it. Prompts are mixed here, from the likeliest next tokens that the
endpoint names for each. Nothing from it is trusted; see `endpoint.py`.
"""

import collections
import functools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from rsearch.llm.endpoint import (
    BYTES_PER_TOKEN,
    CHECK_CHAT,
    PATH,
    Call,
    Endpoint,
    counted_tokens,
    first_choice,
    message_text,
    sendable,
    unfinished_reason,
)
from rsearch.llm.requests import (
    CUT,
    STOPPED,
    Completion,
    Completions,
    Failure,
    Generate,
    Mix,
    Score,
    Scorer,
    TextScore,
    TextWithMarkers,
    answer_in_turns,
    cut_at_stop,
    cut_pieces,
    token_pieces,
)
from rsearch.protocols.base import replace_surrogates
from rsearch.runtime.calls import Reply, parse_json
from rsearch.types import Messages

RAW_PATH = "/completions"
LOGP_BYTES_PER_TOKEN = 1024  # a token, its bytes, and the likeliest alternatives
ENDS = ("stop_reason", "matched_stop")  # what stopped a reply, in vLLM and in SGLang
LOGPROB_KEYS = ("content", "tokens")  # in "logprobs", for chats and for raw texts
MIN_LOGP = -1e9
NO_LOGP = Failure("no log-probabilities")
NUM_TOP_TOKENS = 20  # likeliest tokens to ask for: the most that OpenAI and vLLM give
CONTROL = re.compile(rb"<\|[^<>]+\|>|</s>|<eos>|<end_of_turn>")  # not text of a reply
NO_IDS = np.zeros(0, np.int32)
LOGP = "log-probabilities of a reply's tokens"
TOP_TOKENS = f"a list of the {NUM_TOP_TOKENS} likeliest next tokens"
SCORER_HINT = " (config.eval.scored_by = 'policy' gives them)"


class RemoteModel:
    """A backend that turns each request of a method into calls of an endpoint.

    A completion has no ids. Its log-probabilities are those of the endpoint, which
    decides whether they are at temperature 1.

    Attributes:
        num_rows: maximum number of concurrent calls.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        concurrency: int,
        scorer: Scorer | None = None,
        **settings: Any,
    ):
        """Prepare calls without making any.

        Args:
            url, model: the endpoint and its model; see `Endpoint`.
            concurrency: maximum number of concurrent calls.
            scorer: model that scores texts instead of the endpoint.
            **settings: other arguments of `Endpoint`.

        Raises:
            ValueError: see `Endpoint`.
        """
        self._endpoint = Endpoint(url, model, concurrency=concurrency, **settings)
        self.num_rows = concurrency
        self._scorer = scorer
        self._provided: set[str] = set()  # of LOGP and TOP_TOKENS, so far

    def load(self, params: Any) -> None:
        """Pass parameters to the scorer; see `Scorer.load`."""
        if self._scorer is not None:
            self._scorer.load(params)

    def check(
        self, probes: Sequence[tuple[Generate | Mix | Score, Sequence[str]]] = ()
    ) -> None:
        """Call the endpoint once, and once for each probe; see `Endpoint.check`.

        Args:
            probes: (request, the methods that need its answer) of each.

        Raises:
            ValueError: the endpoint refuses, or its reply lacks what a probe asks for;
                names the methods.
        """
        self._endpoint.check(_call(Generate(CHECK_CHAT, 1)))
        for probe, methods in probes:
            if isinstance(probe, Score):
                self._check_scorer(methods)
                continue
            is_mix = isinstance(probe, Mix)
            call = _next_call(probe.prompts[0], "") if is_mix else _call(probe)
            if self._endpoint.check(call) is NO_LOGP:
                raise self._unsupported(TOP_TOKENS if is_mix else LOGP, methods)

    def on_any_host(self, value: object) -> bool:
        """Return whether the value is true on this host; each host calls by itself."""
        return bool(value)

    def generate(self, requests: Sequence[Generate]) -> Completions:
        """Continue each prompt; a Failure if its calls failed for good.

        A reply without the log-probabilities that are wanted is a failed call.

        Raises:
            ValueError: requests want log-probabilities but no reply so far has any, or
                a prompt has marks, although the endpoint decides which text becomes a
                control token.
            OutageError: the endpoint was unreachable for too long.
        """
        return answer_in_turns(requests, self._generate_all)

    def _generate_all(self, requests) -> list[Completion | Failure]:
        if any(isinstance(request.prompt, TextWithMarkers) for request in requests):
            raise self._unsupported("a choice of which text becomes a control token")
        # Endpoints may answer equal seeds with equal replies, so requests are numbered.
        draw_counts: collections.Counter = collections.Counter()
        calls = []
        for request in requests:
            calls.append(_call(request, number=draw_counts[request.draw]))
            draw_counts[request.draw] += 1
        replies = self._ask(calls, LOGP, lambda completion: len(completion.logp) > 0)
        return [
            Failure(reply.reason) if reply.value is None else reply.value
            for reply in replies
        ]

    def mix(self, requests: Sequence[Mix]) -> Completions:
        """Continue each mixture; a Failure if a call failed for good.

        For each token, every prompt takes one call that continues it with the tokens so
        far. An endpoint names the `NUM_TOP_TOKENS` likeliest tokens. The probability of
        any other token is at most that of the last one named, and at most what remains.
        A line reports how many tokens might differ if all probabilities were known.

        Raises:
            ValueError: no reply so far names any likeliest tokens, or a mixture has raw
                texts or should be sampled.
            OutageError: the endpoint was unreachable for too long.
        """
        return answer_in_turns(requests, self._mix_all)

    def _mix_all(self, requests) -> list[Completion | Failure]:
        if any(isinstance(prompt, str) for r in requests for prompt in r.prompts):
            raise self._unsupported("mixtures of raw texts")
        if any(request.draw for request in requests):
            raise self._unsupported("samples of mixtures")
        tokens: list[list[bytes]] = [[] for _ in requests]
        num_read: dict[int, int | None] = {}  # of each mixture's prompts
        results: list[Completion | Failure | None] = [None] * len(requests)
        num_steps = num_close = 0
        while indices := [i for i, result in enumerate(results) if result is None]:
            calls = [
                _next_call(prompt, b"".join(tokens[i]).decode())
                for i in indices
                for prompt in requests[i].prompts
            ]
            replies = self._ask(calls, TOP_TOKENS, lambda distribution: True)
            start = 0
            for i in indices:
                end = start + len(requests[i].prompts)
                if i not in num_read:
                    num_read[i] = _num_read(replies[start:end])
                results[i], is_close = _add_token(
                    requests[i], tokens[i], replies[start:end], num_read[i]
                )
                start, num_steps, num_close = end, num_steps + 1, num_close + is_close
        if num_close:
            self._endpoint.log(
                f"{num_close} of {num_steps} tokens of mixtures might differ if "
                f"{self._endpoint.masked_url} gave the probabilities of all tokens"
            )
        return results

    def _ask(self, calls, feature, has_feature) -> list[Reply]:
        """Return the reply to each call; one that lacks the feature is a failed call.

        Args:
            feature: LOGP or TOP_TOKENS.
            has_feature: (value of a reply) -> whether it shows that the endpoint
                provides the feature.

        Raises:
            ValueError: a reply lacks the feature, and no reply so far has it.
        """
        replies = self._endpoint.ask(
            [c._replace(read=functools.partial(_with_logp, c.read)) for c in calls]
        )
        if any(r.value is not None and has_feature(r.value) for r in replies):
            self._provided.add(feature)
        is_missing = any(reply.reason == NO_LOGP.reason for reply in replies)
        if is_missing and feature not in self._provided:
            raise self._unsupported(feature)
        return replies

    def score(self, requests: Sequence[Score]) -> list[TextScore | None]:
        """Score each text with the scorer; see `Scorer.score`.

        Raises:
            ValueError: there is no scorer.
        """
        self._check_scorer()
        return self._scorer.score(requests)

    def _check_scorer(self, methods=()):
        if self._scorer is None:
            raise self._unsupported(
                f"log-probabilities of a text that is sent to it{SCORER_HINT}", methods
            )

    def _unsupported(self, feature, methods=()) -> ValueError:
        endpoint, names = self._endpoint, ", ".join(map(repr, methods))
        return ValueError(
            f"{endpoint.field}: {endpoint.masked_url} does not provide {feature}, "
            f"which {names or 'a method'} of config.eval.methods needs: name a model "
            "that runs here"
        )


def _call(request: Generate, *, number: int = 0) -> Call:
    """Return the call for a request.

    Args:
        request: the request; its seed is derived from its draw, and no seed is sent
            without one.
        number: number of earlier requests with the same draw.
    """
    is_raw = isinstance(request.prompt, str)
    body: dict[str, Any] = {"max_tokens": request.max_tokens}
    if is_raw:
        body["prompt"] = replace_surrogates(request.prompt)
    else:
        body["messages"] = sendable(request.prompt)
    if request.continued and not is_raw:
        body |= _continuation(body["messages"], replace_surrogates(request.continued))
    if request.stop:
        body["stop"] = list(request.stop)
    if request.wants_logp:
        body["logprobs"] = 1 if is_raw else True
    if request.draw:
        name = np.array([*request.draw, number], "<i8").tobytes()
        body["seed"] = xxhash.xxh32_intdigest(name) >> 1  # fits in an int32
    return Call(
        RAW_PATH if is_raw else PATH,
        body,
        functools.partial(_completion, request),
        LOGP_BYTES_PER_TOKEN if request.wants_logp else BYTES_PER_TOKEN,
    )


def _continuation(messages: Messages, text: str) -> dict:
    """Return the fields of a call that continues the assistant's text so far."""
    return {
        "messages": [*messages, {"role": "assistant", "content": text}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


def _with_logp(read, data: bytes) -> Any:
    """Return what a call reads in a reply, where NO_LOGP is a failure to be retried."""
    reply = read(data)
    if isinstance(reply, Reply) and reply.value is NO_LOGP:
        return Reply(None, NO_LOGP.reason, is_own_fault=True)
    return reply


class _Distribution(NamedTuple):
    """The likeliest next tokens of a prompt.

    Attributes:
        probs: probability of each token that the endpoint names.
        bound: the greatest probability that any other token can have.
        last: the token that the endpoint drew if the text ends with it, else None.
        num_read: number of tokens of the prompt; None if the endpoint does not say.
    """

    probs: dict[bytes, float]
    bound: float
    last: bytes | None
    num_read: int | None


def _next_call(prompt: Messages, text: str) -> Call:
    """Return the call that asks for the likeliest next tokens of a prompt."""
    messages = sendable(prompt)
    body: dict[str, Any] = {"messages": messages, "max_tokens": 1}
    if text:
        body |= _continuation(messages, text)
    body |= {"logprobs": True, "top_logprobs": NUM_TOP_TOKENS}
    return Call(PATH, body, _distribution, NUM_TOP_TOKENS * LOGP_BYTES_PER_TOKEN)


def _distribution(data: bytes) -> Reply | None:
    """Return the _Distribution in a reply; None if the reply has another shape.

    A reply that names no likeliest tokens becomes NO_LOGP.
    """
    reply = parse_json(data)
    choice = first_choice(reply)
    text_and_reason = None if choice is None else message_text(choice)
    if text_and_reason is None:
        return None
    if text_and_reason[1]:
        return Reply(None, text_and_reason[1], is_own_fault=True)
    logprobs = choice.get("logprobs")
    rows = logprobs.get("content") if isinstance(logprobs, dict) else None
    if rows == []:
        return Reply(None, "an end without its probability", is_own_fault=True)
    row = rows[0] if isinstance(rows, list) else None
    top_rows = row.get("top_logprobs") if isinstance(row, dict) else None
    if not isinstance(top_rows, list):
        return Reply(NO_LOGP)
    if not top_rows or not all(isinstance(top_row, dict) for top_row in top_rows):
        return None
    sample, tokens = _token_bytes(row), [_token_bytes(top_row) for top_row in top_rows]
    logps = [top_row.get("logprob") for top_row in top_rows]
    if None in (sample, *tokens) or not all(map(_is_logp, logps)):
        return None
    probs: dict[bytes, float] = collections.defaultdict(float)
    for token, logp in zip(tokens, logps, strict=True):
        probs[token] += math.exp(logp)
    unnamed_mass = max(0.0, 1 - sum(probs.values()))
    last = sample if choice.get("finish_reason") == "stop" else None
    bound = min(unnamed_mass, math.exp(min(logps)))
    num_read, _ = counted_tokens(reply) or (None, None)
    return Reply(_Distribution(probs, bound, last, num_read))


def _num_read(replies: Sequence[Reply]) -> int | None:
    """Return the number of tokens of a mixture's prompts; None if it is unknown."""
    counts = [reply.value and reply.value.num_read for reply in replies]
    return None if None in counts else sum(counts)


def _add_token(
    request: Mix,
    tokens: list[bytes],
    replies: Sequence[Reply],
    num_read: int | None,
) -> tuple[Completion | Failure | None, bool]:
    """Add the likeliest token of a mixture.

    Args:
        tokens: its tokens so far; the next one is appended.
        replies: replies to the call of each prompt, with a _Distribution each.
        num_read: number of tokens of all its prompts; None if it is unknown.

    Returns:
        (the result if it ended, whether another token might be likelier).
    """
    for reply in replies:
        if reply.value is None:
            return Failure(reply.reason), False
    distributions = [reply.value for reply in replies]
    pairs = list(zip(request.weights, distributions, strict=True))
    options = {token for distribution in distributions for token in distribution.probs}
    lower = {t: sum(w * n.probs.get(t, 0.0) for w, n in pairs) for t in options}
    upper = {t: sum(w * n.probs.get(t, n.bound) for w, n in pairs) for t in options}
    unnamed_bound = sum(w * n.bound for w, n in pairs)
    # Ties are broken by bytes, so that the order within replies does not matter.
    best = max(sorted(options), key=lower.__getitem__)
    other_bounds = [upper[token] for token in options if token != best]
    is_close = lower[best] < max([unnamed_bound, *other_bounds])
    has_ended = best in [n.last for n in distributions] or bool(CONTROL.fullmatch(best))
    if not has_ended:
        tokens.append(best)
    if not has_ended and len(tokens) < request.max_tokens:
        try:
            b"".join(tokens).decode()
        except UnicodeDecodeError:
            # A message cannot end within a character.
            return Failure("a token that is part of a character"), is_close
        return None, is_close
    pieces = token_pieces(tokens)
    return Completion(
        text="".join(pieces),
        end=STOPPED if has_ended else CUT,
        tokens=pieces,
        logp=np.zeros(0, np.float32),
        prompt_ids=NO_IDS,
        ids=NO_IDS,
        prompt_text="\n\n".join(map(_chat_text, request.prompts)),
        endpoint_tokens=None if num_read is None else (num_read, len(tokens)),
    ), is_close


def _completion(request: Generate, data: bytes) -> Reply | None:
    """Return the Completion in a request's reply; None if it has another shape.

    A reply without the log-probabilities that are wanted becomes NO_LOGP.
    """
    reply = parse_json(data)
    choice = first_choice(reply)
    if choice is None:
        return None
    if isinstance(request.prompt, str):
        text, reason = choice.get("text"), unfinished_reason(choice)
        if not isinstance(text, str):
            return None
        text, prompt_text = replace_surrogates(text), request.prompt
    elif (text_and_reason := message_text(choice)) is not None:
        text, reason = text_and_reason
        prompt_text = _chat_text(request.prompt) + request.continued
    else:
        return None
    if reason:
        return Reply(None, reason, is_own_fault=True)
    text, stop = cut_at_stop(text, request.stop)
    tokens, logp = (), np.zeros(0, np.float32)
    if request.wants_logp and text:  # some servers give none of an empty text
        logprobs = choice.get("logprobs")
        if not isinstance(logprobs, dict):
            logprobs = {}
        if not any(isinstance(logprobs.get(name), list) for name in LOGPROB_KEYS):
            return Reply(NO_LOGP)
        token_logps = _token_logps(logprobs)
        if token_logps is None:
            return None
        # The tokens of a stop string and of the end of text may follow; drop them.
        tokens = cut_pieces(token_logps[0], len(text))
        logp = token_logps[1][: len(tokens)]
        if "".join(tokens) != text:
            return Reply(None, "log-probabilities of another text", is_own_fault=True)
    is_cut = choice.get("finish_reason") == "length" and not stop
    return Reply(
        Completion(
            text=text,
            end=CUT if is_cut else STOPPED,
            tokens=tokens,
            logp=logp,
            prompt_ids=NO_IDS,
            ids=NO_IDS,
            prompt_text=prompt_text,
            stop=stop or _stop_of(choice, request.stop),
            endpoint_tokens=counted_tokens(reply),
        )
    )


def _stop_of(choice, stop) -> str | None:
    """Return the stop string an endpoint names, or ""; None if it does not say."""
    if choice.get("finish_reason") == "length":
        return ""
    stop_values = [choice[name] for name in ENDS if name in choice]
    if not stop_values:
        return None
    return stop_values[0] if stop_values[0] in stop else ""


def _token_logps(logprobs) -> tuple[tuple[str, ...], np.ndarray] | None:
    """Return the tokens' ([n] pieces, [n] float32); None if they have another shape.

    A chat has [{"token", "logprob", "bytes"}] as "content"; raw text has "tokens" and
    "token_logprobs".
    """
    rows, texts = logprobs.get("content"), logprobs.get("tokens")
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        tokens = [_token_bytes(row) for row in rows]
        values = [row.get("logprob") for row in rows]
    elif isinstance(texts, list):
        tokens = [_utf8(text) for text in texts]
        values = logprobs.get("token_logprobs")
    else:
        return None
    is_right = isinstance(values, list) and len(values) == len(tokens)
    if not is_right or None in tokens or not all(map(_is_logp, values)):
        return None
    return token_pieces(tokens), np.array(values, np.float32)


def _token_bytes(row) -> bytes | None:
    """Return the bytes of a chat's token; a character may span several tokens."""
    raw = row.get("bytes")
    is_bytes = isinstance(raw, list) and all(
        type(byte) is int and 0 <= byte < 256 for byte in raw
    )
    return bytes(raw) if is_bytes else _utf8(row.get("token"))


def _utf8(text) -> bytes | None:
    return replace_surrogates(text).encode() if isinstance(text, str) else None


def _is_logp(value) -> bool:
    return type(value) in (int, float) and MIN_LOGP <= value <= 0


def _chat_text(chat: Messages) -> str:
    """Return what the model was shown of a chat: its messages, without a template."""
    return "\n".join(f"{m['role']}: {m['content']}" for m in chat)
