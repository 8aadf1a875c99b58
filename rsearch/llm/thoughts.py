"""Take a model's answer from what it has written: thoughts are no part of it.

A reasoning model thinks before it answers. A judge's reply with the thought in it would
be scored as the answer, and a thought that was cut would be scored as a wrong one.
"""

import collections
import re
from collections.abc import Callable, Sequence

MARKS = (  # around thoughts, as public models write them
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3 and most others
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("[THINK]", "[/THINK]"),  # Magistral
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi
)
OPENING = re.compile("|".join(re.escape(mark) for mark, _ in MARKS), re.IGNORECASE)
CLOSING = re.compile("|".join(re.escape(mark) for _, mark in MARKS), re.IGNORECASE)


def answer_after_thoughts(text: str, *, is_cut: bool = False) -> tuple[str | None, str]:
    """Return the answer in a model's reply: what stands behind its last thought.

    Args:
        text: the reply.
        is_cut: its length was reached, so that the model may not have been done.

    Returns:
        (the answer, "") or (None, why there is none, in few words). An answer that was
        cut is one, and a reply without a thought is left as it is.
    """
    closings = list(CLOSING.finditer(text))
    answer = text[closings[-1].end() :].lstrip() if closings else text
    if OPENING.search(answer):
        return None, "cut within a thought" if is_cut else "a thought without an end"
    if not answer.strip():
        return None, "cut before an answer" if is_cut else "an empty reply"
    return answer, ""


def begins_in_thought(prompt: str) -> bool:
    """Return whether a prompt's template has opened the thought of its reply."""
    end = prompt.rstrip()[-max(len(mark) for mark, _ in MARKS) :]
    return any(end.lower().endswith(mark.lower()) for mark, _ in MARKS)


def say_failures(
    name: str, reasons: Sequence[str], num_chats: int, say: Callable[[str], None]
) -> None:
    """Say how many chats a model has failed to answer, and why; nothing without any.

    Args:
        name: of the model.
        reasons: of each chat that failed, in few words.
        num_chats: that it was asked.
        say: called with the line.
    """
    if reasons:
        counts = collections.Counter(reasons).most_common(3)
        shown = ", ".join(f"{why} ({n})" for why, n in counts)
        say(f"{name}: {len(reasons)} of {num_chats} chats failed: {shown}")
