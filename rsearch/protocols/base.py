"""What a protocol is: a frozen value that says how policy and search engine talk."""

import dataclasses
from collections.abc import Callable, Sequence

from rsearch.types import Action, Messages, Observation, Passage


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How a conversation between policy and search engine is written.

    Attributes:
        name: the key in PROTOCOLS.
        system: system message, or None to send none.
        user: user message with one `{question}` field.
        add_question_mark: strip the question and end it with '?' (Search-R1).
        stop_strings: the policy pauses when it has written one of these.
        parse: the policy's turn -> its action. Total: any text has a result.
        observe: (queries, passages for each query) -> what the policy is shown.
        invalid_message: shown after a malformed turn; None ends the rollout instead.
    """

    name: str
    system: str | None
    user: str
    add_question_mark: bool
    stop_strings: tuple[str, ...]
    parse: Callable[[str], Action]
    observe: Callable[[Sequence[str], Sequence[Sequence[Passage]]], Observation]
    invalid_message: str | None

    def messages(self, question: str) -> Messages:
        """The chat that opens a rollout of this question."""
        if self.add_question_mark:
            question = question.strip()
            question += "" if question.endswith("?") else "?"
        # Not str.format: a question may hold braces.
        user = {"role": "user", "content": self.user.replace("{question}", question)}
        if self.system is None:
            return [user]
        return [{"role": "system", "content": self.system}, user]
