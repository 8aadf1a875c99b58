"""Select questions for which Self-Ask's steps can be written from gold facts."""

from rsearch.data.oracle import gold_triples
from rsearch.methods.follow_ups import follow_ups, question_about
from rsearch.protocols import plain
from rsearch.stages.curate.rolling import DataStage, world_hops
from rsearch.stages.curate.summary import Decision, Selection
from rsearch.text.normalize import cover_exact_match


def gold_follow_ups(stage: DataStage) -> Selection:
    """Select the questions of which a search for each fact shows that fact.

    No model is called. The facts are those behind the embedded world's questions, or
    2WikiMultiHopQA's `evidences`.

    Args:
        stage: the stage, which rolls out nothing.
    """
    triples_by_id = {q.id: _triples(stage, q) for q in stage.questions}
    lookups = [
        (question_about(t), q.id) for q in stage.questions for t in triples_by_id[q.id]
    ]
    queries, question_ids = zip(*lookups) if lookups else ((), ())
    # One batch, in the order of the questions and their facts.
    results = iter(stage.passages_of(queries, question_ids))
    decisions, demonstrations = [], []
    for question in stage.questions:
        triples = triples_by_id[question.id]
        fault = _fault(stage, triples, [next(results) for _ in triples])
        demonstrations += [] if fault else follow_ups(question, triples)
        decisions.append(Decision(fault or f"facts: {len(triples)}", not fault, 0))
    return Selection(decisions, demonstrations)


def _fault(stage, triples, passages_by_fact):
    """Return why a question's facts cannot be learnt from these passages, or ""."""
    c, limit = stage.config.curate, stage.config.rollout.max_observation_tokens
    if not triples:
        return "no gold facts"
    if None in passages_by_fact:
        return "search failed"

    def holds_all(texts):
        return all(
            cover_exact_match(text, (value,), normalize=c.normalize, order=c.order)
            for (_, _, value), text in zip(triples, texts, strict=True)
        )

    if not holds_all(" ".join(p.contents for p in hits) for hits in passages_by_fact):
        return "fact in no passage"
    # Cut as the supervised stage shows them. A reading below passages that lack its
    # answer would teach the model to guess.
    texts = map(plain.write_passages, passages_by_fact)
    is_shown = holds_all(stage.tokenizer.cut(text, limit) for text in texts)
    return "" if is_shown else "cut off"


def _triples(stage, question):
    """Return (subject, relation, object) of each fact behind a question."""
    hops = world_hops(stage, question.id)
    triples = [(hop.subject, hop.relation, hop.object) for hop in hops]
    return triples or gold_triples(question)
