"""Make Self-RAG's training data (arXiv 2310.11511), its critic replaced by gold labels.

The answers are the model's: rows of `direct` and `rag` of an evaluation on the training
questions. What GPT-4 would judge follows from golden answers and passages instead.
"""

from rsearch.data.labels import read_labels
from rsearch.data.questions import bare_title, supporting_passages
from rsearch.data.reflections import reflections
from rsearch.stages.curate.rolling import DataStage
from rsearch.stages.curate.summary import Decision, Selection

STRATEGIES = ("direct", "rag")  # whose answers are graded


def gold_reflections(stage: DataStage) -> Selection:
    """Choose what to reflect on: each question, and each passage that it finds.

    Args:
        stage: that rolls out nothing; config.curate.labels has the model's answers.

    Raises:
        ValueError: see `read_labels`.
    """
    c = stage.config
    # As a method of an evaluation shows it.
    limit = c.eval.passage_tokens or c.rollout.max_observation_tokens
    # Labels are of the data set that the stage's questions are of.
    labelled = read_labels(
        STRATEGIES, c.curate.labels, c.data.train, field="config.curate.labels"
    )
    answers = {row.question: row.answers for row in labelled}
    decisions, demonstrations = [], []
    # The model's answers are from the same index, whose passages no transcript keeps.
    results = stage.search([question.text for question in stage.questions])
    for question, passages in zip(stage.questions, results, strict=True):
        key, gold = _gold(stage, question)
        wrong = "" if question.text in answers else "not labelled"
        wrong = wrong or ("" if gold else "no gold passages")
        wrong = wrong or ("search failed" if passages is None else "")
        if wrong:
            decisions.append(Decision(wrong, False, 0))
            continue
        shown = []
        for passage in passages:
            # The model reads what it was trained on.
            ids = stage.tokenizer.encode_start(passage.contents, limit)[:limit]
            shown.append((stage.tokenizer.decode(ids), key(passage) in gold))
        made = reflections(
            question, *answers[question.text], shown, normalize=c.curate.normalize
        )
        demonstrations += made
        decisions.append(Decision(made[0][0], True, 0))
    return Selection(decisions, demonstrations)


def _gold(stage, question):
    """Return (a passage's key, keys of the gold ones); see `supporting_passages`."""
    if stage.world is not None and question.id in stage.world.hops:
        return bare_title, {hop.subject for hop in stage.world.hops[question.id]}
    return supporting_passages(question)
