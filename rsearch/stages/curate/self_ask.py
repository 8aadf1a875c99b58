"""Select questions for which Self-Ask's steps can be written from gold facts."""

from rsearch.data.oracle import gold_triples
from rsearch.methods.follow_ups import follow_ups, question_about
from rsearch.protocols import plain
from rsearch.stages.curate.rolling import DataStage
from rsearch.stages.curate.summary import Decision, Selection
from rsearch.text.normalize import cover_exact_match


def gold_follow_ups(stage: DataStage) -> Selection:
    """Select the questions whose facts can all be found, and read, by asking for each.

    No model is called. The facts are those behind the embedded world's questions, or
    2WikiMultiHopQA's `evidences`.

    Args:
        stage: the stage, which rolls out nothing.
    """
    c = stage.config.curate
    triples_by_id = {q.id: _triples(stage, q) for q in stage.questions}
    lookups = [
        (question_about(t), q.id) for q in stage.questions for t in triples_by_id[q.id]
    ]
    queries, question_ids = zip(*lookups) if lookups else ((), ())
    # One batch, in the order of the questions and their facts.
    results = iter(stage.passages_of(queries, question_ids))

    def holds_all(texts, triples):
        return all(
            cover_exact_match(text, (value,), normalize=c.normalize, order=c.order)
            for (_, _, value), text in zip(triples, texts, strict=True)
        )

    decisions, demonstrations = [], []
    for question in stage.questions:
        triples = triples_by_id[question.id]
        passages_by_fact = [next(results) for _ in triples]
        fault = "" if triples else "no gold facts"
        if None in passages_by_fact:
            fault = "search failed"
        else:
            texts = [" ".join(p.contents for p in hits) for hits in passages_by_fact]
            # A reading below passages that lack its answer would teach to guess.
            shown_texts = [_shown(stage, hits) for hits in passages_by_fact]
            if not holds_all(texts, triples):
                fault = "fact in no passage"
            elif not holds_all(shown_texts, triples):
                fault = "cut off"
        demonstrations += [] if fault else follow_ups(question, triples)
        decisions.append(Decision(fault or f"facts: {len(triples)}", not fault, 0))
    return Selection(decisions, demonstrations)


def _shown(stage, passages):
    """Return the text of passages, cut as the supervised stage shows it to a reader."""
    limit = stage.config.rollout.max_observation_tokens
    ids = stage.tokenizer.encode_start(plain.write_passages(passages), limit)
    return stage.tokenizer.decode(ids[:limit])


def _triples(stage, question):
    """Return (subject, relation, object) of each fact behind a question."""
    if stage.world is not None and question.id in stage.world.hops:
        hops = stage.world.hops[question.id]
        return [(hop.subject, hop.relation, hop.object) for hop in hops]
    return gold_triples(question)
