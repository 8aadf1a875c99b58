"""A data stage: its model answers questions, and what is worth learning is kept.

It writes demonstrations.jsonl or questions.jsonl, which later stages refer to as
"stage:<name>", and finally summary.json, which says what was kept and why. METHODS
holds the selection methods of the papers.
"""

import pathlib

from rsearch.config.stage_plan import DEMONSTRATIONS, QUESTIONS, SUMMARY
from rsearch.data.curation import (
    KEPT_REASON,
    both_knowledge_fault,
    demonstration_record,
    from_record,
    is_right,
    question_record,
    rejection_reason,
    rewording,
    segments,
)
from rsearch.data.demonstrations import Demonstration
from rsearch.data.selection import (
    LEVELS,
    check_datasets,
    difficulty,
    select_mix,
    share,
)
from rsearch.runtime.jsonl import write_jsonl
from rsearch.runtime.workdir import write_json
from rsearch.stages.curate.chains import chains, no_reasoning
from rsearch.stages.curate.oracle import gold_searches
from rsearch.stages.curate.rolling import FIRST, DataStage
from rsearch.stages.curate.self_ask import gold_follow_ups
from rsearch.stages.curate.self_rag import gold_reflections
from rsearch.stages.curate.summary import (
    Decision,
    Selection,
    check_selection,
    draw_at_most,
    selection_summary,
    show_summary,
)
from rsearch.text.extension import lookup

TOOLS_FAILED = "tools failed"  # verdict on a question about which nothing is known


def is_finished(folder: pathlib.Path) -> bool:
    """Return whether a stage has written all of its files to a folder."""
    return (folder / SUMMARY).is_file()


def run(stage: DataStage) -> None:
    """Select data, continuing where an earlier start of this stage stopped.

    Args:
        stage: the stage; its model is the teacher.

    Raises:
        ValueError: nothing was kept, for the reasons in the message, or a file of
            another stage is missing.
    """
    c, folder = stage.config, stage.folder
    # summary.json is written last: if it exists, the other files are complete.
    if is_finished(folder):
        return
    method = lookup("config.curate.method", c.curate.method, METHODS)
    selection = check_selection(c.curate.method, method(stage), stage.questions)
    # After the method, so that the limit only draws from what is good.
    selection = draw_at_most(selection, stage.questions, c.curate.max_kept, seed=c.seed)
    summary = selection_summary(stage.name, c.curate.method, selection, stage.questions)
    show_summary(summary)
    if not selection.demonstrations and not selection.questions:
        reasons = ", ".join(
            f"{v['verdict']} {v['questions']}" for v in summary["verdicts"]
        )
        raise ValueError(
            f"stage {stage.name}: config.curate.method = {c.curate.method!r} kept none "
            f"of {len(stage.questions)} questions: {reasons}"
        )

    def write():
        if selection.demonstrations:
            rows = [demonstration_record(d) for _, d in selection.demonstrations]
            write_jsonl(folder / DEMONSTRATIONS, rows)
        if selection.questions:
            write_jsonl(folder / QUESTIONS, selection.questions)
        write_json(folder / SUMMARY, summary)

    stage.retry_io(write)


def _demonstrations(stage: DataStage, make):
    """Select demonstrations from correct rollouts.

    At most config.curate.rollouts are sampled per question.

    Args:
        stage: the stage that rolls out.
        make: (question, attempt without `fault`) -> ([(kind, Demonstration)], "" or
            what is wrong).
    """
    c, protocol = stage.config.curate, stage.protocol

    def select(question, attempt):
        fault = rejection_reason(protocol, question, attempt, **_measure(c))
        return ([], fault) if fault else make(question, attempt)

    def is_enough(question, attempts):
        return sum(bool(select(question, a)[0]) for a in attempts) >= c.per_question

    # Roll out in rounds; a question with enough good attempts skips further rounds.
    all_attempts = stage.roll_out(
        FIRST, stage.questions, max_rollouts=c.rollouts, is_enough=is_enough
    )
    decisions, demonstrations = [], []
    for question, attempts in zip(stage.questions, all_attempts, strict=True):
        selection: list[tuple] = []
        reason, num_chosen = "not rolled out", 0
        for attempt in attempts:
            # The question's reason is that of its last attempt that failed.
            pairs, fault = select(question, attempt)
            reason = fault or reason
            if pairs and num_chosen < c.per_question:
                selection += pairs
                num_chosen += 1
        reason = KEPT_REASON if selection else reason
        decisions.append(Decision(reason, bool(selection), len(attempts)))
        demonstrations += selection
    return Selection(decisions, demonstrations)


def _segments(stage: DataStage) -> Selection:
    """Select RAG-R1's demonstrations: correct rollouts, cut into four kinds."""
    return _demonstrations(stage, lambda q, a: (segments(stage.protocol, q, a), ""))


def _uncut(stage: DataStage) -> Selection:
    """Select correct rollouts as they are, with every turn to be learnt.

    The SFT that R1-Searcher compares RL with imitates such paths (its Table 4).
    """

    def make(question, attempt):
        kind = f"{len(attempt.turns)} turns"
        return [(kind, Demonstration(question, attempt.turns))], ""

    return _demonstrations(stage, make)


def _both_knowledge(stage: DataStage) -> Selection:
    """Select R1-Searcher++'s cold start: correct rollouts that recall and search."""

    def make(question, attempt):
        fault = both_knowledge_fault(attempt)
        pairs = [("both", Demonstration(question, attempt.turns))]
        return ([] if fault else pairs), fault

    return _demonstrations(stage, make)


def _rewriter(stage: DataStage) -> Selection:
    """Select the rewriting model's demonstrations: passages reworded as if recalled.

    They are made from rollouts that the cold start may learn from: R1-Searcher++
    section 4.2.2 trains the rewriting model on the data filtered in section 4.1.
    """
    c, protocol = stage.config, stage.protocol
    settings = dict(user=c.protocol.rewrite, **_measure(c.curate))

    def make(question, attempt):
        if fault := both_knowledge_fault(attempt):
            return [], fault
        result = rewording(protocol, question, attempt, **settings)
        return ([], "not verified") if result is None else ([("reworded", result)], "")

    return _demonstrations(stage, make)


def _answerable(stage: DataStage) -> Selection:
    """Select RAG-R1's questions for RL: wrong at first, but answerable.

    A share of those that were right is added. A question whose tools failed is neither,
    since nothing is known about it. Without retries all wrong ones are kept, as in the
    paper's ablation "w/o Filter". Source: RAG-R1 sections 3.2.1 and 6.1.
    """
    c, seed = stage.config.curate, stage.config.seed
    # 1. A first pass shows which questions the model already answers.
    is_solved = _make_solved_check(c)
    first = stage.roll_out(
        FIRST, stage.questions, max_rollouts=c.rollouts, is_enough=is_solved
    )
    verdicts = [is_solved(q, a) for q, a in zip(stage.questions, first, strict=True)]
    wrong_questions = [
        question
        for question, was_right, attempts in zip(stage.questions, verdicts, first)
        if not was_right and _has_valid_attempt(attempts)
    ]
    # 2. The wrong ones are retried, at a higher temperature and with more searches: one
    # right rollout shows that an answer can be found.
    retries = stage.roll_out(
        "retry",
        wrong_questions,
        max_rollouts=c.retry_rollouts,
        is_enough=is_solved,
        temperature=c.retry_temperature,
        max_searches=c.retry_searches,
    )
    retries_by_id = {
        q.id: attempts for q, attempts in zip(wrong_questions, retries, strict=True)
    }
    # 3. A share of the right ones keeps the set from having only hard questions.
    right_questions = [
        q for q, was_solved in zip(stage.questions, verdicts) if was_solved
    ]
    drawn_ids = {
        right_questions[i].id for i in share(right_questions, c.right_share, seed=seed)
    }
    decisions, records = [], []
    for question, attempts in zip(stage.questions, first, strict=True):
        retry_attempts = retries_by_id.get(question.id, [])
        if not _has_valid_attempt(attempts):
            is_kept, name = False, TOOLS_FAILED
        elif question.id in retries_by_id:
            is_kept = is_solved(question, retry_attempts) or not c.retry_rollouts
            name = "wrong, answerable" if is_kept else "wrong, unanswerable"
            if not c.retry_rollouts:
                name = "wrong, not retried"
            elif not _has_valid_attempt(retry_attempts):
                name = f"wrong, {TOOLS_FAILED}"
        else:
            is_kept = question.id in drawn_ids
            name = "right, drawn" if is_kept else "right, not drawn"
        decisions.append(Decision(name, is_kept, len(attempts) + len(retry_attempts)))
        if is_kept:
            records.append(question_record(question))
    return Selection(decisions, questions=records)


def _difficulty(stage: DataStage) -> Selection:
    """Select R1-Searcher's questions: a mix by how many rollouts each needed."""
    c = stage.config.curate
    check_datasets(stage.questions, c.mix)  # before hours of rollouts
    is_solved = _make_solved_check(c)
    all_attempts = stage.roll_out(
        FIRST, stage.questions, max_rollouts=c.rollouts, is_enough=is_solved
    )
    return _mix(stage, _labels(stage, all_attempts), [len(a) for a in all_attempts])


def _remix(stage: DataStage) -> Selection:
    """Select another mix of questions whose difficulty is known, without rollouts.

    The difficulty is in their metadata, or follows from the rollouts of the stage
    config.curate.first.
    """
    c = stage.config.curate
    if c.first:
        records_by_id = stage.first_journal().records(FIRST)
        all_attempts = [
            list(map(from_record, records_by_id.get(q.id, ()))) for q in stage.questions
        ]
        return _mix(stage, _labels(stage, all_attempts), [0] * len(all_attempts))
    levels = [q.metadata.get("difficulty") for q in stage.questions]
    rollouts_needed = [q.metadata.get("rollouts_needed") for q in stage.questions]
    # The metadata comes from the user: an unknown level counts as none.
    labels = [(v if v in LEVELS else None, n) for v, n in zip(levels, rollouts_needed)]
    return _mix(stage, labels, [0] * len(labels))


def _labels(stage, all_attempts):
    """Return (level or None, number of the first right rollout or None) for each."""
    c = stage.config.curate
    labels = []
    for question, attempts in zip(stage.questions, all_attempts, strict=True):
        valid_attempts = [a for a in attempts if a.outcome.is_signal]
        correctness = (is_right(question, a, **_measure(c)) for a in valid_attempts)
        # Count only valid attempts: an outage of the tools makes no question harder.
        number = next((n for n, correct in enumerate(correctness, 1) if correct), None)
        level = difficulty(number, easy_below=c.easy_below, hard_above=c.hard_above)
        # Fewer than `hard_above` wrong ones do not show that more are needed.
        is_known = c.keep_unsolved and len(valid_attempts) >= c.hard_above
        labels.append((level if number or is_known else None, number))
    return labels


def _mix(stage, labels, num_rollouts):
    c, seed = stage.config.curate, stage.config.seed
    levels = [level for level, _ in labels]
    # `short` names the entries of the mix that had fewer questions than they ask for.
    indices, short = select_mix(stage.questions, levels, c.mix, seed=seed)
    kept_indices = set(indices)
    decisions, records = [], []
    for i, (question, (level, number)) in enumerate(zip(stage.questions, labels)):
        is_kept = i in kept_indices
        name = level or "no level"
        name += "" if is_kept else ", not taken"
        decisions.append(Decision(name, is_kept, num_rollouts[i]))
        if is_kept:
            fields = {"difficulty": level, "rollouts_needed": number}
            records.append(question_record(question, **fields))
    return Selection(
        decisions, questions=records, notes=[f"config.curate.mix: {s}" for s in short]
    )


def _has_valid_attempt(attempts):
    """Return whether there is an attempt in which no tool failed."""
    return any(a.outcome.is_signal for a in attempts)


def _measure(c):
    """Return the settings of config.curate for judging answers."""
    return {n: c[n] for n in ("measure", "normalize", "order", "max_words")}


def _make_solved_check(c):
    """Return (question, attempts) -> whether any attempt is right."""
    return lambda question, attempts: any(
        is_right(question, a, **_measure(c)) for a in attempts
    )


METHODS = {
    "segments": _segments,
    "whole": _uncut,
    "answerable": _answerable,
    "difficulty": _difficulty,
    "mix": _remix,
    "both_knowledge": _both_knowledge,
    "rewriter": _rewriter,
    "chains": chains,
    "no_reasoning": no_reasoning,
    "self_rag": gold_reflections,
    "self_ask": gold_follow_ups,
    "oracle": gold_searches,
}
