"""The host side of a rollout: parse turns, run tools, show their results.

A conversation is an append-only list of segments of token ids. The policy's text is
decoded for the parser, but never encoded back into ids. Only observations, which are
new text, are encoded, each on its own.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from rsearch.models.tokenizer import Tokenizer
from rsearch.protocols.base import Protocol
from rsearch.tools.search import search_tool
from rsearch.types import (
    SEARCH,
    Answer,
    Cut,
    Malformed,
    Messages,
    Observation,
    Outcome,
    Rollout,
    SearchFn,
    Segment,
    Source,
    Tool,
    ToolCall,
    ToolResult,
    ToolUse,
    unsampled_segment,
)

MAX_TURNS = 99  # budgets leave room for two-digit turn numbers


@dataclasses.dataclass(frozen=True)
class Limits:
    """Budgets of one rollout, in turns and tokens.

    Attributes:
        max_searches: number of turns whose calls are run; one more turn follows, whose
            calls are not run.
        max_prompt_tokens: a longer prompt is an error; prompts are never cut.
        max_turn_tokens: tokens the policy may write per turn.
        max_observation_tokens: tokens that retrieved content is cut to, for each query
            on its own if the protocol keeps them apart; the tags around it are kept.
        forced_final_turn: False if that last turn does not follow, so that the results
            of the last search are never read.
        cuts_tags: whether tags count as content, so that a cut removes the closing tag.
        max_tokens: tokens of a whole rollout, which ends when the next observation and
            turn would not fit. 0 = what the other limits add up to.
    """

    max_searches: int
    max_prompt_tokens: int
    max_turn_tokens: int
    max_observation_tokens: int
    forced_final_turn: bool = True
    cuts_tags: bool = False
    max_tokens: int = 0

    @property
    def num_turns(self) -> int:
        """Return the most turns that the policy may write, at least one."""
        return max(1, self.max_searches + self.forced_final_turn)


class Markup(NamedTuple):
    """Counts of what a conversation reads in addition to retrieved content.

    Attributes:
        tags: tokens in an observation's tags.
        message: tokens in the invalid-action message.
        parts: contents in one observation that each have the observation budget.
        echoes: 1 if an observation repeats its turn's queries, else 0.
    """

    tags: int
    message: int
    parts: int = 1
    echoes: int = 0


def markup_tokens(tokenizer: Tokenizer, protocol: Protocol) -> Markup:
    """Return the protocol's Markup, with the largest tag count of any observation."""
    message = len(tokenizer.encode(protocol.invalid_message or ""))
    # Empty results contain everything that does not depend on what is retrieved: tags,
    # and the text between the parts of a protocol that shows JSON.
    counts = range(1, protocol.max_queries + 1)
    observations = [protocol.show_passages([""] * n, [()] * n) for n in counts]
    tags = max(
        _tag_tokens(tokenizer, protocol, observation) for observation in observations
    )
    return untagged_markup(protocol)._replace(tags=tags, message=message)


def untagged_markup(protocol: Protocol) -> Markup:
    """Return the part of the Markup that needs no tokenizer: its parts and echoes."""
    num_queries = protocol.max_queries
    observation = protocol.show_passages([""] * num_queries, [()] * num_queries)
    cuts = [p for p in observation.pieces if isinstance(p, Cut)]
    parts = sum(not p.is_echo for p in cuts) if cuts else 1
    return Markup(0, 0, parts, any(p.is_echo for p in cuts))


def _tag_tokens(tokenizer, protocol, observation: Observation) -> int:
    """Return the number of tokens that no budget cuts, for the longest turn number."""
    fixed_texts = [p for p in observation.pieces if isinstance(p, str)]
    count = sum(len(tokenizer.encode(text)) for text in fixed_texts)
    frame = _role_frame(tokenizer, protocol)
    is_numbered = frame is None and "{turn}" in observation.before
    turns = range(1, MAX_TURNS + 1) if is_numbered else [1]
    frames = [_frame(tokenizer, frame, observation, turn) for turn in turns]
    return count + max(len(before) + len(after) for before, after in frames)


def _role_frame(tokenizer, protocol):
    """Return the chat template's ids around observations; None if they have no role."""
    role = protocol.observation_role
    return None if role is None else tokenizer.role_frame(role)


def _turn_end(tokenizer, protocol, role) -> int:
    """Return the first turn-ending id that the template writes before this role."""
    frame = tokenizer.role_frame(role) if protocol.is_chat else None
    before = [] if frame is None else frame[0].tolist()
    return next((i for i in before if i in tokenizer.eos_ids), tokenizer.eos_ids[0])


def _turn_start(tokenizer, protocol) -> str:
    """Return the whitespace between the template's generation prompt and a reply."""
    if not protocol.is_chat or protocol.opening or not tokenizer.has_template:
        return ""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        request = tokenizer.decode(tokenizer.encode_prompt(chat[:1]))
        dialogue = tokenizer.decode(tokenizer.encode_prompt(chat))
    except ValueError:  # some templates refuse a chat that ends with a reply
        return ""
    separator = dialogue.removeprefix(request).partition("b")[0]
    return separator if dialogue.startswith(request) and separator.isspace() else ""


def _frame(tokenizer, role_frame, observation: Observation, turn: int):
    """Return the ids before and after an observation's content.

    Only the frame that a chat template puts around a role can contain control tokens.
    """
    if role_frame is not None:
        return role_frame
    before = observation.before.replace("{turn}", str(turn))
    return tokenizer.encode(before), tokenizer.encode(observation.after)


def tokens_between_turns(limits: Limits, markup: Markup) -> int:
    """Return the most tokens that a conversation reads between two turns."""
    retrieved_tokens = markup.parts * limits.max_observation_tokens
    query_tokens = markup.echoes * limits.max_turn_tokens
    return max(retrieved_tokens + query_tokens + markup.tags, markup.message)


def conversation_tokens(limits: Limits, markup: Markup) -> int:
    """Return the number of tokens of the longest conversation within these limits."""
    turn_tokens = limits.num_turns * limits.max_turn_tokens
    observation_tokens = (limits.num_turns - 1) * tokens_between_turns(limits, markup)
    num_tokens = limits.max_prompt_tokens + turn_tokens + observation_tokens
    return min(num_tokens, limits.max_tokens or num_tokens)


def check_max_tokens(limits: Limits, markup: Markup) -> None:
    """Reject a token limit that leaves no room for a search and an answer.

    Raises:
        ValueError: the limit is too small; the message names
            config.rollout.context_tokens and the terms of the sum.
    """
    shortest_limits = dataclasses.replace(
        limits, max_searches=min(1, limits.max_searches), max_tokens=0
    )
    min_tokens = conversation_tokens(shortest_limits, markup)
    if 0 < limits.max_tokens < min_tokens:
        raise ValueError(
            f"config.rollout.context_tokens = {limits.max_tokens} is too small for one "
            f"search: {explain_conversation_tokens(shortest_limits, markup)} = "
            f"{min_tokens} tokens"
        )


def explain_conversation_tokens(limits: Limits, markup: Markup) -> str:
    """Return the terms that `conversation_tokens` adds up as text, for messages."""
    parts = f"{markup.parts} x " if markup.parts > 1 else ""
    observation = f"{parts}{limits.max_observation_tokens:,}"
    if markup.echoes:
        observation += f" + {limits.max_turn_tokens:,} of queries"
    if markup.tags:
        observation += f" + {markup.tags} of tags"
    if markup.message:
        message = f"{markup.message} of the invalid-action message"
        observation = f"max({observation}, {message})"
    elif " + " in observation:
        observation = f"({observation})"
    return (
        f"prompt {limits.max_prompt_tokens:,} + {limits.num_turns} turns x "
        f"{limits.max_turn_tokens:,} + {limits.num_turns - 1} observations x "
        f"{observation}"
    )


def prompt_ids(
    tokenizer: Tokenizer, protocol: Protocol, messages: Messages
) -> np.ndarray:
    """Return [n] int32 ids that open a rollout: a chat, or raw text for base models."""
    if protocol.is_chat:
        return tokenizer.encode_prompt(messages, protocol.opening)
    text = "\n".join(message["content"] for message in messages)
    return tokenizer.encode_raw(text, protocol.opening)


class Conversation:
    """A rollout in progress, whose searches are for the question `question_id`."""

    def __init__(self, prompt: np.ndarray, text: str, question_id: str = ""):
        self.question_id = question_id
        self.segments = [unsampled_segment(Source.PROMPT, prompt, text)]
        self.tool_uses: list[ToolUse] = []
        self.answer: str | None = None
        self.outcome: Outcome | None = None
        self.num_malformed = 0
        self.num_cut_observations = 0
        self.num_turns = 0
        self.is_cut = False  # whether the last turn used up its budget
        self.is_at_limit = False  # whether it asks for a search that is not allowed

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens so far, including the prompt."""
        return sum(len(segment.token_ids) for segment in self.segments)

    def rollout(self) -> Rollout:
        """Return the rollout of a conversation that has ended."""
        assert self.outcome is not None
        return Rollout(
            segments=tuple(self.segments),
            answer=self.answer,
            tool_uses=tuple(self.tool_uses),
            outcome=self.outcome,
            num_malformed=self.num_malformed,
            num_cut_observations=self.num_cut_observations,
            is_cut=self.is_cut,
            is_at_limit=self.is_at_limit,
        )


class Host:
    """The policy's counterpart: it opens conversations and answers the policy's turns.

    Args:
        tokenizer, protocol: the policy's.
        search: retrieves passages.
        limits: budgets of a rollout.
        tools: {name: tool} that the policy can call in addition to search.
        on_change: called with a conversation after each of its turns and each result of
            a call, on the thread that produced it. If it returns false, the rollout
            ends as truncated. None lets all rollouts continue.

    Attributes:
        on_write: called every few tokens with a conversation and the text so far of its
            unfinished turn; may be set between the calls of an engine. None lets a turn
            be decoded in fewer device calls.
    """

    on_write: Callable[[Conversation, str], None] | None = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        protocol: Protocol,
        search: SearchFn,
        limits: Limits,
        tools: Mapping[str, Tool] | None = None,
        on_change: Callable[[Conversation], bool] | None = None,
    ):
        self.tokenizer, self.protocol = tokenizer, protocol
        self._on_change = on_change
        self.limits = limits
        self.tools = {SEARCH: search_tool(search), **(tools or {})}
        # Calls of `run_tools` overlap if the search allows it and is the only tool.
        overlapping = getattr(search, "searches_at_once", 1)
        self.searches_at_once = 1 if tools else overlapping
        assert limits.num_turns <= MAX_TURNS
        message = protocol.invalid_message
        self._invalid = None if message is None else tokenizer.encode(message)
        self._role_frame = _role_frame(tokenizer, protocol)
        self._ends = {
            Answer: _turn_end(tokenizer, protocol, "user"),
            ToolCall: _turn_end(
                tokenizer, protocol, protocol.observation_role or "user"
            ),
        }
        self._start = _turn_start(tokenizer, protocol)
        self.tokens_between_turns = tokens_between_turns(
            limits, markup_tokens(tokenizer, protocol)
        )

    def prompt(self, messages: Messages) -> np.ndarray:
        """Return [n] int32 ids of the chat that opens a rollout."""
        return prompt_ids(self.tokenizer, self.protocol, messages)

    def end_of(self, action: ToolCall | Answer) -> int:
        """Return the id that ends a turn with this action if no stop string does.

        ChatML closes every turn. In GLM-4 the next role's token ends a turn: the
        observation's token after a call, the user's after an answer. Raw text, and
        templates without such an id, use the first end-of-text id.
        """
        return self._ends[type(action)]

    def start_of(self, number: int) -> str:
        """Return the whitespace that the template puts before the words of a turn.

        The policy writes it: GLM-4, for example, has a line feed after <|assistant|>
        that is not part of the prompt. A turn after a plain-text observation has none.

        Args:
            number: turn number, from 0.
        """
        return self._start if number == 0 or self._role_frame is not None else ""

    def open(self, prompt: np.ndarray, question_id: str = "") -> Conversation:
        """Return a conversation that begins with a prompt.

        Args:
            prompt: [n] int32 ids.
            question_id: id of the question, for a search that needs it.
        """
        return Conversation(prompt, self.tokenizer.decode(prompt), question_id)

    def show_text(self, conversation: Conversation, ids: np.ndarray) -> None:
        """Pass the text of an unfinished turn to `on_write`, if that is set.

        Args:
            conversation: conversation that the policy is continuing.
            ids: [n] int32 ids of the turn so far; the last character may be incomplete.
        """
        if self.on_write is not None:
            self.on_write(conversation, self.tokenizer.decode(ids).rstrip("\ufffd"))

    def answer_turns(
        self,
        conversations: Mapping[int, Conversation],
        turns: Mapping[int, tuple[np.ndarray, np.ndarray]],
        *,
        final: bool,
        recorded: Mapping[int, str] | None = None,
    ) -> dict[int, np.ndarray]:
        """Parse the turn of each row, and run the calls of each tool as one batch.

        Args:
            conversations: row -> conversation.
            turns: row -> ([n] int32 ids, [n] float32 log-probabilities) of its turn.
            final: whether this was the last turn: nothing is read after it, and no tool
                is called if it was the forced one.
            recorded: row -> content to show it, whatever it called.

        Returns:
            Row -> [n] ids that it reads next; the other rows of `turns` have ended.
        """
        calls, observation_ids = self.read_turns(conversations, turns, final=final)
        return observation_ids | self.run_tools(
            conversations, calls, final=final, recorded=recorded
        )

    def read_turns(
        self,
        conversations: Mapping[int, Conversation],
        turns: Mapping[int, tuple[np.ndarray, np.ndarray]],
        *,
        final: bool,
    ) -> tuple[dict[int, ToolCall], dict[int, np.ndarray]]:
        """Parse turns without running tools: the first half of `answer_turns`.

        Returns:
            Row -> its call, and row -> [n] ids that it reads next; the other rows of
            `turns` have ended.
        """
        may_call = not final or not self.limits.forced_final_turn
        calls: dict[int, ToolCall] = {}
        observation_ids: dict[int, np.ndarray] = {}
        for i, (ids, logp) in turns.items():
            conversation = conversations[i]
            text = self.tokenizer.decode(self._without_eos(ids))
            conversation.segments.append(Segment(Source.POLICY, ids, logp, text))
            conversation.num_turns += 1
            is_cut = conversation.is_cut = self._is_cut(ids, text)
            action = self.protocol.parse(text)
            # A protocol parses any tool name; an unknown one is the policy's mistake.
            if isinstance(action, ToolCall) and action.name not in self.tools:
                action = Malformed(f"no tool {action.name!r}")
            match action:
                case Answer(answer):
                    conversation.answer = answer
                    conversation.outcome = (
                        Outcome.TRUNCATED if is_cut else Outcome.ANSWERED
                    )
                case ToolCall(name, arguments) if may_call and self.limits.max_searches:
                    if name == SEARCH:
                        arguments = arguments[: self.protocol.max_queries]
                    calls[i] = ToolCall(name, arguments)
                case ToolCall():  # forced last turn, or max_searches is 0
                    conversation.outcome = Outcome.TRUNCATED
                    conversation.is_at_limit = True
                case Malformed():
                    conversation.num_malformed += 1
                    if final or self._invalid is None:
                        conversation.outcome = (
                            Outcome.TRUNCATED if is_cut else Outcome.MALFORMED
                        )
                    else:
                        message = self.protocol.invalid_message
                        if self._show(conversation, self._invalid, message):
                            observation_ids[i] = self._invalid
        for i in self._ended(conversations, turns):
            calls.pop(i, None)
            observation_ids.pop(i, None)
        return calls, observation_ids

    def run_tools(
        self,
        conversations: Mapping[int, Conversation],
        calls: Mapping[int, ToolCall],
        *,
        final: bool,
        recorded: Mapping[int, str] | None = None,
    ) -> dict[int, np.ndarray]:
        """Run the rows' tool calls: the second half of `answer_turns`."""
        observation_ids: dict[int, np.ndarray] = {}
        for i, observation in self._observations(
            conversations, calls, recorded or {}
        ).items():
            if final:
                conversations[i].outcome = Outcome.TRUNCATED
                conversations[i].is_at_limit = True
                continue
            ids = self._encode(observation, conversations[i])
            if self._show(conversations[i], ids, self.tokenizer.decode(ids)):
                observation_ids[i] = ids
        for i in self._ended(conversations, calls):
            observation_ids.pop(i, None)
        return observation_ids

    def _show(self, conversation: Conversation, ids: np.ndarray, text: str) -> bool:
        """Append what the policy reads next, or end a rollout that has no room for it.

        Returns:
            Whether the rollout continues.
        """
        num_tokens = conversation.num_tokens + len(ids) + self.limits.max_turn_tokens
        if 0 < self.limits.max_tokens < num_tokens:
            conversation.outcome = Outcome.TRUNCATED
            return False
        conversation.segments.append(unsampled_segment(Source.SEARCH, ids, text))
        return True

    def _ended(self, conversations, rows: Iterable[int]) -> list[int]:
        """Return the rows that `on_change` ends, and set their outcomes."""
        if self._on_change is None:
            return []
        ended_rows = [i for i in rows if not self._on_change(conversations[i])]
        for i in ended_rows:
            conversations[i].outcome = conversations[i].outcome or Outcome.TRUNCATED
        return ended_rows

    def _without_eos(self, ids: np.ndarray) -> np.ndarray:
        """Return a turn without the end-of-text id, which is not part of its text."""
        return ids[:-1] if len(ids) and ids[-1] in self.tokenizer.eos_ids else ids

    def _is_cut(self, ids: np.ndarray, text: str) -> bool:
        """Return whether the turn was ended by its budget and not by the policy."""
        is_full = len(ids) >= self.limits.max_turn_tokens
        has_stop = any(stop in text for stop in self.protocol.stop_strings)
        return is_full and not has_stop and ids[-1] not in self.tokenizer.eos_ids

    def _observations(
        self, conversations, calls: Mapping[int, ToolCall], recorded: Mapping[int, str]
    ) -> dict[int, Observation]:
        """Run all calls, one batch per tool, and append them to the conversations.

        If a tool fails, the rollout ends without an observation.
        """
        results: dict[int, ToolResult] = {}
        live_calls = {i: call for i, call in calls.items() if i not in recorded}
        for name in dict.fromkeys(call.name for call in live_calls.values()):
            rows = [i for i, call in live_calls.items() if call.name == name]
            batch = [live_calls[i] for i in rows]
            if name == SEARCH:
                question_ids = [conversations[i].question_id for i in rows]
                batch_results = self.tools[name](batch, question_ids)
            else:
                batch_results = self.tools[name](batch)
            results |= zip(rows, batch_results, strict=True)
        observations = {}
        for i, call in calls.items():
            # Recorded content takes the place of a result, and comes without passages.
            result = results.get(i, ToolResult(data=((),) * len(call.arguments)))
            if result.error is not None:
                conversations[i].outcome = Outcome.TOOL_ERROR
                continue
            conversations[i].tool_uses.append(ToolUse(call, result))
            observation = self.protocol.observe(call, result)
            if i in recorded:
                observation = dataclasses.replace(
                    observation, content=recorded[i], pieces=()
                )
            observations[i] = observation
        return observations

    def _encode(self, observation: Observation, conversation) -> np.ndarray:
        """Return [n] ids of an observation, with its content cut to its budget."""
        before, after = _frame(
            self.tokenizer, self._role_frame, observation, conversation.num_turns
        )
        last = conversation.segments[-1].token_ids[-1:].tolist()
        if last and last == before[:1].tolist() and last[0] in self.tokenizer.eos_ids:
            before = before[1:]  # The policy has already written this id.
        limit, echo = self.limits.max_observation_tokens, self.limits.max_turn_tokens
        id_parts, is_cut = [], False
        for content in observation.pieces or (Cut(observation.content),):
            if isinstance(content, str):
                ids = self.tokenizer.encode(content)
            else:
                ids, was_cut = self._cut(content, echo if content.is_echo else limit)
                is_cut |= was_cut
                echo -= len(ids) if content.is_echo else 0
            id_parts.append(ids)
        observation_ids = np.concatenate([before, *id_parts, after])
        if self.limits.cuts_tags:
            is_cut |= len(observation_ids) > limit
            observation_ids = observation_ids[:limit]
        # The tags of a user's protocol may be longer than those of empty results.
        if len(observation_ids) > self.tokens_between_turns:
            raise ValueError(
                f"protocol {self.protocol.name!r}: an observation has "
                f"{len(observation_ids)} tokens, more than the "
                f"{self.tokens_between_turns} of the budgets and of the tags around "
                "empty results: only `content`, or the Cuts of `pieces`, may depend on "
                "what is retrieved"
            )
        conversation.num_cut_observations += is_cut
        return observation_ids

    def _cut(self, cut: Cut, limit: int) -> tuple[np.ndarray, bool]:
        """Return [n <= limit] ids, cut only where text may end, and if it was cut."""
        ids = self.tokenizer.encode_start(cut.text, limit)
        if len(ids) <= limit:
            return ids, False
        while limit and not cut.may_end(self.tokenizer.decode(ids[:limit])):
            limit -= 1
        return ids[:limit], True
