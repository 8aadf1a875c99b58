"""Extract a model's answer from its reply by removing its thoughts.

A reasoning model thinks before it answers. If thoughts were kept, a judge's would be
scored as its answer, and a truncated thought would be scored as a wrong answer.
"""

import collections
import re
from collections.abc import Callable, Sequence

MARKS = (  # the tags around thoughts that public models write
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3 and most others
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("[THINK]", "[/THINK]"),  # Magistral
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi
)
OPENING = re.compile("|".join(re.escape(mark) for mark, _ in MARKS), re.IGNORECASE)
CLOSING = re.compile("|".join(re.escape(mark) for _, mark in MARKS), re.IGNORECASE)


def answer_after_thoughts(
    text: str, *, prompt: str = "", is_cut: bool = False
) -> tuple[str | None, str]:
    """Return the answer in a model's reply: what follows its last thought.

    Args:
        text: the reply.
        prompt: what the model has read, as far as it is known. Its template may open a
            thought, which the reply then continues.
        is_cut: whether it reached its maximum length, so that it may be incomplete.

    Returns:
        (the answer, "") or (None, the reason in few words). A truncated answer counts
        as an answer, and a reply without thoughts is returned unchanged.
    """
    answer = text_after_thoughts(text, prompt=prompt)
    if answer is None:
        return None, "cut within a thought" if is_cut else "a thought without an end"
    if not answer.strip():
        return None, "cut before an answer" if is_cut else "an empty reply"
    return (answer if answer == text else answer.lstrip()), ""


def text_after_thoughts(text: str, *, prompt: str = "") -> str | None:
    """Return the end of a text after its last thought; None if it ends within one.

    Args:
        prompt: see `answer_after_thoughts`.
    """
    closings = list(CLOSING.finditer(text))
    end = text[closings[-1].end() :] if closings else text
    is_within = OPENING.search(end) or (not closings and _opens_thought(prompt))
    return None if is_within else end


def _opens_thought(prompt: str) -> bool:
    """Return whether a prompt ends with the opening mark of a thought."""
    return prompt.rstrip().lower().endswith(tuple(mark.lower() for mark, _ in MARKS))


def log_failures(
    name: str, reasons: Sequence[str], num_chats: int, log: Callable[[str], None]
) -> None:
    """Report how many chats a model failed to answer, and why; nothing if none failed.

    Args:
        reasons: why each failed chat failed, in few words.
    """
    if reasons:
        counts = collections.Counter(reasons).most_common(3)
        reason_counts = ", ".join(f"{reason} ({n})" for reason, n in counts)
        log(f"{name}: {len(reasons)} of {num_chats} chats failed: {reason_counts}")
