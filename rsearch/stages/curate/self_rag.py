"""Make Self-RAG's training data (arXiv 2310.11511), with gold labels as the critic.

The answers are the model's: rows of `direct` and `rag` in an evaluation on the training
questions. Golden answers and passages replace the judgements of GPT-4.
"""

from rsearch.data.labels import read_labels
from rsearch.data.questions import bare_title, supporting_passages
from rsearch.data.reflections import reflections
from rsearch.stages.curate.rolling import DataStage, world_hops
from rsearch.stages.curate.summary import Decision, Selection

STRATEGIES = ("direct", "rag")  # methods whose answers are graded


def gold_reflections(stage: DataStage) -> Selection:
    """Select what to reflect on: each question, and each passage that it finds.

    Args:
        stage: the stage, which rolls out nothing; config.curate.labels names the
            model's answers.

    Raises:
        ValueError: see `read_labels`.
    """
    c = stage.config
    # The same limit as for a method in an evaluation.
    limit = c.eval.passage_tokens or c.rollout.max_observation_tokens
    # Labels are for the dataset that the stage's questions come from.
    labels = read_labels(
        STRATEGIES, c.curate.labels, c.data.train, field="config.curate.labels"
    )
    answers = {row.question: row.answers for row in labels}
    decisions, demonstrations = [], []
    # The answers came from the same index, but transcripts do not keep its passages.
    texts = [question.text for question in stage.questions]
    results = stage.passages_of(texts, [question.id for question in stage.questions])
    for question, passages in zip(stage.questions, results, strict=True):
        key, gold = _gold(stage, question)
        fault = "" if question.text in answers else "not labelled"
        fault = fault or ("" if gold else "no gold passages")
        fault = fault or ("search failed" if passages is None else "")
        if fault:
            decisions.append(Decision(fault, False, 0))
            continue
        # Cut as in an evaluation, so that the model reads what it was trained on.
        texts = [
            (stage.tokenizer.cut(passage.contents, limit), key(passage) in gold)
            for passage in passages
        ]
        pairs = reflections(
            question, *answers[question.text], texts, normalize=c.curate.normalize
        )
        demonstrations += pairs
        decisions.append(Decision(pairs[0][0], True, 0))
    return Selection(decisions, demonstrations)


def _gold(stage, question):
    """Return (passage -> key, keys of gold passages); see `supporting_passages`."""
    if hops := world_hops(stage, question.id):
        return bare_title, {hop.subject for hop in hops}
    return supporting_passages(question)
