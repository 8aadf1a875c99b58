"""The scope of a reward: the parts of a rollout that it reads.

- "policy": what the policy itself wrote, turn by turn, and the answer and searches that
  the protocol read from it. No passage can influence it. The default everywhere.
- "transcript": prompt, turns and observations as one text, as in the public code of
  Search-R1 and R-Search. Retrieved text counts like the policy's own.
- "response": the same without the prompt, as in R1-Searcher's public code.

The last two exist to reproduce published numbers.
"""

from typing import Literal

from rsearch.protocols.tagged import spans, tagged_texts
from rsearch.types import Rollout, Source

Normalize = Literal["squad", "r1_searcher", "flashrag"]  # see rsearch.text.normalize
Order = Literal["any", "contiguous", "substring"]  # order of words
AnswerScope = Literal["policy", "transcript", "response"]


def transcript(rollout: Rollout) -> str:
    """Return all segments as one text."""
    return "".join(segment.text for segment in rollout.segments)


def response(rollout: Rollout) -> str:
    """Return all segments after the prompt as one text."""
    return "".join(s.text for s in rollout.segments if s.source != Source.PROMPT)


def answer_in(rollout: Rollout, scope: str) -> str | None:
    """Return the answer that counts in this scope, or None.

    Args:
        rollout: any rollout.
        scope: "policy": the answer that the protocol read. "transcript": the last of at
            least two answer boxes; fewer are no answer. The rule is for a prompt with
            one box. Search-R1's has two, the last of which is the answer of a rollout
            without any. "response": the text from the last opening tag to the next
            closing one; no answer if either tag is missing.
    """
    if scope == "policy":
        return rollout.answer
    if scope == "transcript":
        answers = first_close_texts(transcript(rollout), "answer")
        return answers[-1] if len(answers) > 1 else None
    assert scope == "response", scope
    text = response(rollout)
    if "<answer>" not in text or "</answer>" not in text:
        return None
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def policy_boxes(rollout: Rollout, tag: str) -> list[str]:
    """Return the texts in the policy's boxes; a box never spans two turns."""
    return [
        content for turn in rollout.policy_texts for content in tagged_texts(turn, tag)
    ]


def first_close_texts(text: str, tag: str) -> list[str]:
    """Return the stripped texts from each opening tag to the next closing one.

    This is how the public code finds boxes. It differs from
    `rsearch.protocols.tagged.tagged_texts` if a tag opens twice before it closes.
    """
    return [text[a:b].strip() for a, b in spans(text, f"<{tag}>", f"</{tag}>")]
