"""Choose rollouts of a run for its report, and what the report shows of each.

Evaluated rollouts come from transcripts.jsonl, with their scores. Rollouts that a stage
was trained on come from STAGE/rollouts/step_000012.jsonl.gz, if the run stored any,
with their rewards and the advantage and probability of each policy token.
"""

import math
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rsearch.evaluation.results import (
    TRANSCRIPTS,
    has_answers,
    normalizers_of,
    read_transcripts,
)
from rsearch.evaluation.runs import last_stage
from rsearch.evaluation.scoring import scores_of_rows
from rsearch.rollout.rollout_log import read_rollouts, stored_steps

POLICY = "policy"  # source of the tokens that are trained on
PROTOCOL = "protocol"  # the method that asks the policy as in training
NO_PASSAGE = {"id": "", "title": "", "score": None}
MAX_TEXT = 4000  # characters shown of a segment
MAX_BARS = 240  # per rollout, one for each token; with more tokens, several share one


def evaluated_views(
    folder: pathlib.Path, stages: Sequence[str], number: int
) -> list[dict]:
    """Return views of the last evaluation's rollouts, half of them wrong if possible.

    Args:
        stages: stages of the run; the last one that was evaluated counts.

    Raises:
        ValueError: a line was not written by an evaluation; names the file and line.
    """
    if not number or not (folder / TRANSCRIPTS).is_file():
        return []
    rows = read_transcripts(folder)
    protocol_rows = [row for row in rows if row["method"] == PROTOCOL]
    rows = protocol_rows or rows
    last = last_stage(rows, stages) if rows else ""
    rows = [row for row in rows if row["stage"] == last]
    normalizers = normalizers_of(folder, rows, "")
    right_views, wrong_views, unscored_views = [], [], []
    for row, normalize in zip(rows, normalizers, strict=True):
        view = _view(row)
        if normalize and has_answers(row):
            scores = scores_of_rows([row], normalize)
            view["scores"] = {n: float(values[0]) for n, values in scores.items()}
            (right_views if view["scores"]["em"] else wrong_views).append(view)
        else:
            unscored_views.append(view)
    num_wrong = max(number - number // 2, number - len(right_views))
    views = _spread(wrong_views, num_wrong)
    return views + _spread(right_views + unscored_views, number - len(views))


def trained_views(stage_folder: pathlib.Path, number: int) -> list[dict]:
    """Return views of whole groups, from steps spread evenly over a stage.

    Each step shows the group whose rewards differ most.

    Args:
        number: number of rollouts, at most; one group is returned even if it is larger.

    Raises:
        ValueError: a line was not written by a stage; names the file and line.
    """
    steps = stored_steps(stage_folder)
    if not number or not steps:
        return []
    size = len(_largest_spread(read_rollouts(stage_folder, steps[0]))) or 1
    views = []
    for step in _spread(steps, max(1, number // size)):
        group = _largest_spread(read_rollouts(stage_folder, step))
        # Colors compare the tokens of one group, whose advantages share a scale.
        largest = max((abs(a) for row in group for a in _advantages(row)), default=0.0)
        for row in group:
            view = _view(row)
            view["bars"], view["tokens_per_bar"] = _bars(row, largest)
            values = [*_advantages(row)]
            view["advantage"] = math.fsum(values) / len(values) if values else None
            views.append(view)
    return views


def _largest_spread(rows) -> list[dict]:
    """Return the rollouts of the step's group whose rewards differ most."""
    groups: dict[Any, list] = {}
    for row in rows:
        groups.setdefault(str(row.get("group")), []).append(row)

    def spread(rows):
        rewards = [*_numbers([row.get("reward") for row in rows])]
        return max(rewards, default=0.0) - min(rewards, default=0.0)

    return max(groups.values(), key=spread, default=[])


def _view(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that every rollout's view has."""
    queries = [q for q in _list(row, "queries") if isinstance(q, str)]
    segments = [
        {
            "source": str(segment.get("source")),
            "is_policy": segment.get("source") == POLICY,
            "is_prompt": segment.get("source") == "prompt",
            "num_tokens": len(_list(segment, "ids")),
            "pieces": _pieces(_shorten_text(segment["text"].strip("\n")), queries),
        }
        for segment in row["segments"]
    ]
    reward, parts = row.get("reward"), row.get("reward_parts")
    passages = row.get("passages")
    return {
        "title": row["question"],
        "id": row.get("id", row.get("question_id", "")),
        "stage": row.get("stage", ""),
        "dataset": row.get("dataset"),
        "setting": row.get("setting"),
        "step": row.get("step"),
        "outcome": row.get("outcome"),
        "answer": row.get("prediction", row.get("answer")),
        "answers": _list(row, "golden_answers") or _list(row, "answers"),
        # Parallel queries are one search. An earlier version wrote no passages.
        "num_searches": len(passages if isinstance(passages, list) else queries),
        # A float if it is one; other values, such as "NaN", are shown as they are.
        "reward": next(_numbers([reward]), reward),
        "parts": parts if isinstance(parts, dict) else {},
        "scores": {},
        "passages": [
            [{**NO_PASSAGE, **p} for p in query_passages if isinstance(p, dict)]
            for query_passages in _list(row, "passages")
            if isinstance(query_passages, list)
        ],
        "segments": segments,
        "advantage": None,
        "bars": [],
        "tokens_per_bar": 1,
    }


def _pieces(text, queries):
    """Split a text into (text, whether it is a query) pairs."""
    phrases = sorted({q.strip() for q in queries if q.strip()}, key=len, reverse=True)
    if not phrases:
        return [(text, False)]
    spans = re.split(f"({'|'.join(map(re.escape, phrases))})", text)
    return [(span, i % 2 == 1) for i, span in enumerate(spans) if span]


def _shorten_text(text):
    """Return a text; if it is very long, a note takes the place of its middle."""
    if len(text) <= MAX_TEXT:
        return text
    head, tail = MAX_TEXT * 3 // 4, MAX_TEXT // 4
    left_out = len(text) - head - tail
    return f"{text[:head]} [... {left_out:,} characters ...] {text[-tail:]}"


def _advantages(row) -> Iterator[float]:
    """Yield the advantage of each of a rollout's policy tokens."""
    value = row.get("advantage")
    num_tokens = sum(len(_list(s, "ids")) for s in _policy_segments(row))
    yield from _numbers(value if isinstance(value, list) else [value] * num_tokens)


def _bars(row, largest):
    """Return bars for the policy's tokens, and how many tokens share each bar.

    A bar's height is the probability with which its token was sampled. Its color shows
    the sign and size of the advantage.
    """
    advantages = [*_advantages(row)]
    logps, ids, starts = [], [], set()
    for segment in _policy_segments(row):
        starts.add(len(ids))
        ids += _list(segment, "ids")
        logps += _list(segment, "sampler_log_probs")
    if len(advantages) != len(ids) or not ids:
        return [], 1
    stride = math.ceil(len(ids) / MAX_BARS)
    bars = []
    for start in range(0, len(ids), stride):
        bar_advantages = advantages[start : start + stride]
        advantage = math.fsum(bar_advantages) / len(bar_advantages)
        last = start + len(bar_advantages) - 1
        text = f"id {ids[start]}" if stride == 1 else f"tokens {start} to {last}"
        text += f", advantage {advantage:+.3g}"
        height = 1.0
        if len(logps) == len(ids):
            probs = [
                math.exp(min(x, 0.0)) for x in _numbers(logps[start : start + stride])
            ]
            height = math.fsum(probs) / len(probs) if probs else 0.0
            text += f", p {height:.3g}"
        bars.append(
            {
                "height": round(100 * height),
                "is_positive": advantage > 0,
                "strength": round(abs(advantage) / largest, 2) if largest else 0.0,
                "begins": bool(starts & {*range(start, start + stride)}) and start > 0,
                "text": text,
            }
        )
    return bars, stride


def _list(row, name) -> list:
    """Return a list of a line, which an earlier or damaged one may lack."""
    value = row.get(name)
    return value if isinstance(value, list) else []


def _policy_segments(row):
    return [s for s in row["segments"] if s.get("source") == POLICY]


def _numbers(values) -> Iterator[float]:
    """Yield the finite numbers among values."""
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and abs(value) <= sys.float_info.max:
            yield float(value)


def _spread(items, number) -> list:
    """Return at most `number` items, spaced evenly from the first to the last."""
    if number >= len(items) or number <= 0:
        return list(items)[: max(number, 0)]
    if number == 1:
        return [items[-1]]
    return [items[i * (len(items) - 1) // (number - 1)] for i in range(number)]
