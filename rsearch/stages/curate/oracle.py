"""Write demonstrations of searching from gold annotations, without calling the model.

The searches are real, and the passages read are those that the engine finds.
"""

import dataclasses

from rsearch.data.curation import (
    ESCAPED_SPACE,
    KEPT_REASON,
    NO_ATTEMPT,
    attempt_of,
    from_record,
    to_record,
)
from rsearch.data.demonstrations import Demonstration
from rsearch.data.oracle import GoldHop, gold_hops, is_shown, plan, plan_queries
from rsearch.data.selection import shuffled_indices
from rsearch.rollout.replay import replay
from rsearch.stages.curate.rolling import DataStage, world_hops
from rsearch.stages.curate.summary import Decision, Selection

PLANS = "oracle"  # name of the pass in the journal


def gold_searches(stage: DataStage) -> Selection:
    """Select the questions whose gold passages and answer can be found and read.

    In a share config.curate.recover_share of them, the demonstration first searches
    with the question itself, misses a gold passage, and then continues like the others.
    If config.curate.searches is not "gold", the questions are the same, but the
    demonstrations search less.

    Raises:
        ValueError: the protocol requires more than annotations can provide.
    """
    c, protocol = stage.config, stage.protocol
    # The tag holds original words of passages, which no annotation marks. Without them,
    # a demonstration would teach the policy to leave them out.
    if protocol.evidence_tag is not None:
        raise ValueError(
            f"config.protocol.name = {c.protocol.name!r}: config.curate.method = "
            f"'oracle' cannot write its <{protocol.evidence_tag}>; use a protocol "
            "without it"
        )
    records = stage.in_waves(PLANS, "gold searches", lambda: _writer(stage))
    solvable = [q for q in stage.questions if not records[q.id][0]["fault"]]
    # A question's second record is its plan with a search that misses a gold passage;
    # only "gold" searches have such plans.
    recoverable = [q for q in solvable if len(records[q.id]) > 1]
    num_wanted = round(c.curate.recover_share * len(solvable))
    # Drawn from those that can recover. Those that need most searches to do so are rare
    # and come first.
    order = shuffled_indices(recoverable, seed=c.seed, name="recover ")
    order.sort(key=lambda i: -_num_extra_searches(records[recoverable[i].id]))
    recovering_ids = {recoverable[i].id for i in order[:num_wanted]}
    decisions, demonstrations = [], []
    for question in stage.questions:
        record = records[question.id][question.id in recovering_ids]
        fault = record["fault"]
        # Nothing is rolled out, so no decision counts rollouts.
        decisions.append(Decision(fault or KEPT_REASON, not fault, 0))
        if not fault:
            attempt = from_record(record)
            kind = f"searches: {len(attempt.searches)}"
            kind += ", recovered" if question.id in recovering_ids else ""
            # Only the turns: the supervised stage searches again, and finds the same.
            demonstrations.append((kind, Demonstration(question, attempt.turns)))
    notes = []
    if c.curate.searches == "gold" and len(recoverable) < num_wanted:
        notes.append(
            f"config.curate.recover_share = {c.curate.recover_share}: of "
            f"{len(solvable)} questions, a search with the question's own words misses "
            f"a gold passage for only {len(recoverable)}"
        )
    return Selection(decisions, demonstrations, notes=notes)


def _num_extra_searches(records):
    """Return how many more searches the recovering plan has than the direct one."""
    num_direct, num_recovering = (len(record["searches"]) for record in records)
    return num_recovering - num_direct


def _writer(stage):
    """Return questions -> the records of each: a plan and, if any, a recovering one."""
    hits_of: dict = {}  # question id -> {query: passages}

    def look_up(queries, question_ids):
        pairs = zip(queries, question_ids, strict=True)
        return [hits_of[name][query] for query, name in pairs]

    look_up.wants_question_ids = True
    host = stage.make_host(search=look_up)

    def write(questions):
        hops = {q.id: _hops(stage, q) for q in questions}
        pairs = [
            (text, q.id) for q in questions for text in plan_queries(q, hops[q.id])
        ]
        # One batch per wave: plans are made from results, and replays look them up.
        results = stage.passages_of([text for text, _ in pairs], [i for _, i in pairs])
        hits_of.clear()
        for (query, name), passages in zip(pairs, results, strict=True):
            hits_of.setdefault(name, {})[query] = passages
        rows = []
        for question in questions:
            inputs = question, hops[question.id], hits_of[question.id]
            row = [_record(stage, host, *inputs, False)]
            if stage.config.curate.searches == "gold":
                extra = _record(stage, host, *inputs, True)
                # A plan that is the same as the first one does not recover.
                is_distinct = not extra["fault"] and extra["turns"] != row[0]["turns"]
                row += [extra] if is_distinct else []
            rows.append(row)
        return rows

    return write


def _hops(stage, question):
    """Return the hops of a question, from the embedded world or its metadata."""
    hops = [GoldHop(hop.subject) for hop in world_hops(stage, question.id)]
    return hops or gold_hops(question)


def _record(stage, host, question, hops, hits_of, recovers):
    """Return the journal's record of a plan, with its "fault" or ""."""
    c = stage.config.curate
    measure = {"normalize": c.normalize, "order": c.order}
    empty_record = to_record(NO_ATTEMPT)
    # The plan is made from full passages; the replay shows whether they can be read.
    steps, fault = plan(question, hops, hits_of, recovers=recovers, **measure)
    attempt, fault = _replayed(stage, host, question, steps, fault)
    if fault:
        return {**empty_record, "fault": fault}
    text = ESCAPED_SPACE.sub(" ", " ".join(attempt.observations))
    if not is_shown(hops, attempt.passages(), steps, text, **measure):
        return {**empty_record, "fault": "cut off"}
    if c.searches != "gold":
        steps, fault = plan(question, hops, hits_of, searches=c.searches, **measure)
        attempt, fault = _replayed(stage, host, question, steps, fault)
        if fault:
            return {**empty_record, "fault": fault}
    return {**to_record(attempt), "fault": ""}


def _replayed(stage, host, question, steps, fault):
    """Return the attempt that steps make within the stage's budgets, and its fault.

    Args:
        stage, host, question: what the steps are for.
        steps: from `plan`.
        fault: why there are no steps, or ""; it is returned as it is.
    """
    protocol = stage.protocol
    if not fault and len(steps) > stage.limits.num_turns:
        fault = "too many searches"
    if fault:
        return NO_ATTEMPT, fault
    try:
        turns = tuple(protocol.write(step) for step in steps)
    except ValueError:  # for example, a tag in a title
        return NO_ATTEMPT, "cannot be written"
    try:
        # As the supervised stage reads it, within the same budgets.
        attempt = attempt_of(protocol, replay(host, question, turns))
    except ValueError:
        return NO_ATTEMPT, "too long"
    # A replay's turns begin with the template's whitespace; a demonstration's do not.
    return dataclasses.replace(attempt, turns=turns), ""
