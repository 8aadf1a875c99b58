"""The scope of a reward: the parts of a rollout that it reads.

- "policy": what the policy itself wrote, turn by turn, and the answer and searches that
  the protocol read from it. No passage can change it. The default everywhere.
- "transcript": prompt, turns and observations as one text, as the public code of
  Search-R1 and R-Search reads it. Retrieved text counts like the policy's own.
- "response": the same without the prompt, as R1-Searcher's public code reads it.

The last two are there to reproduce published numbers.
"""

from typing import Literal

from rsearch.protocols.tagged import boxes, spans
from rsearch.types import Rollout, Source

Normalize = Literal["squad", "r1_searcher", "flashrag"]  # see rsearch.text.normalize
Order = Literal["any", "contiguous", "substring"]  # of words
AnswerScope = Literal["policy", "transcript", "response"]


def transcript(rollout: Rollout) -> str:
    """Return all segments as one text."""
    return "".join(segment.text for segment in rollout.segments)


def response(rollout: Rollout) -> str:
    """Return all segments after the prompt as one text."""
    return "".join(s.text for s in rollout.segments if s.source != Source.PROMPT)


def answer_in(rollout: Rollout, scope: str) -> str | None:
    """Return the answer that counts, or None.

    Args:
        rollout: any.
        scope: "policy": the answer that the protocol read. "transcript": the last of at
            least two answer boxes, for one is the prompt's own example; none or one is
            no answer. "response": what follows the last opening tag, up to the next
            closing one; no answer where either tag is missing.
    """
    if scope == "policy":
        return rollout.answer
    if scope == "transcript":
        answers = pairs(transcript(rollout), "answer")
        return answers[-1] if len(answers) > 1 else None
    assert scope == "response", scope
    text = response(rollout)
    if "<answer>" not in text or "</answer>" not in text:
        return None
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def policy_boxes(rollout: Rollout, tag: str) -> list[str]:
    """Return the texts in the policy's boxes; one never spans two turns."""
    return [content for turn in rollout.policy_texts for content in boxes(turn, tag)]


def pairs(text: str, tag: str) -> list[str]:
    """Return the stripped texts from each opening tag to the next closing one.

    This is how the public code looks for boxes. It differs from
    `rsearch.protocols.tagged.boxes` where a tag opens twice before it closes.
    """
    return [text[a:b].strip() for a, b in spans(text, f"<{tag}>", f"</{tag}>")]
