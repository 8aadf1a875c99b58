"""Data stage: the stage's model answers questions, and what is worth learning is kept.

It writes demonstrations.jsonl or questions.jsonl, which later stages name as
"stage:<name>", and at last summary.json: what was kept and why. METHODS has one method
for each of the papers' ways to choose.
"""

import pathlib

from rsearch.config.stage_plan import DEMONSTRATIONS, QUESTIONS, SUMMARY
from rsearch.data.curation import (
    KEPT,
    both_knowledge_fault,
    demonstration_record,
    fault,
    from_record,
    is_right,
    question_record,
    rewording,
    segments,
)
from rsearch.data.demonstrations import Demonstration
from rsearch.data.selection import LEVELS, difficulty, mixed, share
from rsearch.runtime.jsonl import write_jsonl
from rsearch.runtime.workdir import write_json
from rsearch.stages.curate.chains import chains, no_reasoning
from rsearch.stages.curate.rolling import FIRST, DataStage
from rsearch.stages.curate.summary import (
    Chosen,
    Verdict,
    capped,
    check_chosen,
    show,
    summarise,
)
from rsearch.text.extension import lookup

FAILED = "tools failed"  # what became of a question that nothing is known of


def is_done(folder: pathlib.Path) -> bool:
    """Return whether a stage has written all of its files there."""
    return (folder / SUMMARY).is_file()


def run(stage: DataStage) -> None:
    """Choose data, from where an earlier start of this stage stopped.

    Args:
        stage: its model is the teacher.

    Raises:
        ValueError: nothing was kept, with the reasons; a file of another stage that is
            not there.
    """
    c, folder = stage.config, stage.folder
    if is_done(folder):
        return
    method = lookup("config.curate.method", c.curate.method, METHODS)
    chosen = check_chosen(c.curate.method, method(stage), stage.questions)
    chosen = capped(chosen, stage.questions, c.curate.max_kept, seed=c.seed)
    summary = summarise(stage.name, c.curate.method, chosen, stage.questions)
    show(summary)
    if not chosen.demonstrations and not chosen.questions:
        reasons = ", ".join(
            f"{v['verdict']} {v['questions']}" for v in summary["verdicts"]
        )
        raise ValueError(
            f"stage {stage.name}: config.curate.method = {c.curate.method!r} kept none "
            f"of {len(stage.questions)} questions: {reasons}"
        )
    if chosen.demonstrations:
        rows = [demonstration_record(d) for _, d in chosen.demonstrations]
        write_jsonl(folder / DEMONSTRATIONS, rows)
    if chosen.questions:
        write_jsonl(folder / QUESTIONS, chosen.questions)
    write_json(folder / SUMMARY, summary)


def _demonstrations(stage: DataStage, is_enough, keep):
    """Choose demonstrations from right rollouts, config.curate.rollouts a question.

    Args:
        stage: that rolls out.
        is_enough: (question, attempts) -> bool, see `DataStage.roll_out`.
        keep: (question, attempt) -> ([(kind, Demonstration)], "" or what is wrong).
    """
    c = stage.config.curate
    rolled = stage.roll_out(
        FIRST, stage.questions, max_rollouts=c.rollouts, is_enough=is_enough
    )
    verdicts, found = [], []
    for question, attempts in zip(stage.questions, rolled, strict=True):
        kept, why, num = [], "not rolled out", 0
        for attempt in attempts:
            made, wrong = keep(question, attempt)
            why = wrong or why
            if made and num < c.per_question:
                kept, num = kept + made, num + 1
        verdicts.append(Verdict(KEPT if kept else why, bool(kept), len(attempts)))
        found += kept
    return Chosen(verdicts, found)


def _segments(stage: DataStage) -> Chosen:
    """RAG-R1's demonstrations: correct rollouts, cut into segments of four kinds."""
    c, protocol = stage.config.curate, stage.protocol

    def keep(question, attempt):
        wrong = fault(protocol, question, attempt, **_measure(c))
        return ([] if wrong else segments(protocol, question, attempt)), wrong

    return _demonstrations(stage, _until(c, keep), keep)


def _both_knowledge(stage: DataStage) -> Chosen:
    """R1-Searcher++'s cold start: correct rollouts that recall and search."""
    c, protocol = stage.config.curate, stage.protocol

    def keep(question, attempt):
        wrong = fault(protocol, question, attempt, **_measure(c))
        wrong = wrong or both_knowledge_fault(attempt)
        made = [("both", Demonstration(question, attempt.turns))]
        return ([] if wrong else made), wrong

    return _demonstrations(stage, _until(c, keep), keep)


def _rewriter(stage: DataStage) -> Chosen:
    """The rewriting model's demonstrations: what was found, worded as recalled.

    They are made of what the cold start may learn from: R1-Searcher++ section 4.2.2
    trains the rewriting model on the data filtered in section 4.1.
    """
    c, protocol = stage.config.curate, stage.protocol
    user = stage.config.protocol.rewrite

    def keep(question, attempt):
        wrong = fault(protocol, question, attempt, **_measure(c))
        wrong = wrong or both_knowledge_fault(attempt)
        if wrong:
            return [], wrong
        made = rewording(protocol, question, attempt, user=user, **_measure(c))
        if made is None:
            return [], "not verified"
        return [("reworded", made)], ""

    return _demonstrations(stage, _until(c, keep), keep)


def _answerable(stage: DataStage) -> Chosen:
    """RAG-R1's questions for reinforcement: wrong at first, and yet answerable.

    A share of those that were right is added. Of a question whose tools failed nothing
    is known: it is neither. Without retries all of the wrong ones are kept, as in the
    paper's ablation "w/o Filter". Source: RAG-R1 sections 3.2.1 and 6.1.
    """
    c, seed = stage.config.curate, stage.config.seed
    solved = _solved(c)
    first = stage.roll_out(
        FIRST, stage.questions, max_rollouts=c.rollouts, is_enough=solved
    )
    is_solved = [solved(q, a) for q, a in zip(stage.questions, first, strict=True)]
    wrong = [
        question
        for question, right, attempts in zip(stage.questions, is_solved, first)
        if not right and _says_something(attempts)
    ]
    again = stage.roll_out(
        "retry",
        wrong,
        max_rollouts=c.retry_rollouts,
        is_enough=solved,
        temperature=c.retry_temperature,
        max_searches=c.retry_searches,
    )
    retried = {q.id: attempts for q, attempts in zip(wrong, again, strict=True)}
    right = [q for q, solved_now in zip(stage.questions, is_solved) if solved_now]
    chosen = {right[i].id for i in share(right, c.right_share, seed=seed)}
    verdicts, records = [], []
    for question, attempts in zip(stage.questions, first, strict=True):
        more = retried.get(question.id, [])
        if not _says_something(attempts):
            kept, name = False, FAILED
        elif question.id in retried:
            kept = solved(question, more) or not c.retry_rollouts
            name = "wrong, answerable" if kept else "wrong, unanswerable"
            if not c.retry_rollouts:
                name = "wrong, not retried"
            elif not _says_something(more):
                name = f"wrong, {FAILED}"
        else:
            kept = question.id in chosen
            name = "right, drawn" if kept else "right, not drawn"
        verdicts.append(Verdict(name, kept, len(attempts) + len(more)))
        if kept:
            records.append(question_record(question))
    return Chosen(verdicts, questions=records)


def _difficulty(stage: DataStage) -> Chosen:
    """R1-Searcher's questions: by the rollouts that each needed, in a mix."""
    c = stage.config.curate
    solved = _solved(c)
    rolled = stage.roll_out(
        FIRST, stage.questions, max_rollouts=c.rollouts, is_enough=solved
    )
    return _mix(stage, _needed(stage, rolled), [len(a) for a in rolled])


def _remix(stage: DataStage) -> Chosen:
    """Another mix of questions whose difficulty is known; nothing is rolled out.

    It is in their metadata, or in the rollouts of the stage config.curate.first.
    """
    c = stage.config.curate
    if c.first:
        known = stage.first_journal().of(FIRST)
        rolled = [list(map(from_record, known.get(q.id, ()))) for q in stage.questions]
        return _mix(stage, _needed(stage, rolled), [0] * len(rolled))
    levels = [q.metadata.get("difficulty") for q in stage.questions]
    needed = [q.metadata.get("rollouts_needed") for q in stage.questions]
    labels = [(v if v in LEVELS else None, n) for v, n in zip(levels, needed)]
    return _mix(stage, labels, [0] * len(labels))


def _needed(stage, rolled):
    """[(level or None, number of the first right rollout or None)] of all questions."""
    c = stage.config.curate
    labels = []
    for question, attempts in zip(stage.questions, rolled, strict=True):
        told = [a for a in attempts if a.outcome.is_signal]
        right = (is_right(question, a, **_measure(c)) for a in told)
        needed = next((n for n, good in enumerate(right, 1) if good), None)
        level = difficulty(needed, easy_below=c.easy_below, hard_above=c.hard_above)
        is_left_out = needed is None and not c.keep_unsolved
        labels.append((None if is_left_out or not told else level, needed))
    return labels


def _mix(stage, labels, num_rollouts):
    c, seed = stage.config.curate, stage.config.seed
    levels = [level for level, _ in labels]
    taken, short = mixed(stage.questions, levels, c.mix, seed=seed)
    chosen = set(taken)
    verdicts, records = [], []
    for i, (question, (level, needed)) in enumerate(zip(stage.questions, labels)):
        kept = i in chosen
        name = level or "no level"
        verdicts.append(
            Verdict(name if kept else f"{name}, not taken", kept, num_rollouts[i])
        )
        if kept:
            more = {"difficulty": level, "rollouts_needed": needed}
            records.append(question_record(question, **more))
    return Chosen(
        verdicts, questions=records, notes=[f"config.curate.mix: {s}" for s in short]
    )


def _says_something(attempts):
    """Whether the tools of one of them did not fail."""
    return any(a.outcome.is_signal for a in attempts)


def _measure(c):
    """How config.curate has answers judged."""
    return {n: c[n] for n in ("measure", "normalize", "order", "max_words")}


def _solved(c):
    """(question, attempts) -> whether one is right."""
    return lambda question, attempts: any(
        is_right(question, a, **_measure(c)) for a in attempts
    )


def _until(c, keep):
    """(question, attempts) -> whether config.curate.per_question of them are kept."""
    return lambda question, attempts: (
        sum(bool(keep(question, a)[0]) for a in attempts) >= c.per_question
    )


METHODS = {
    "segments": _segments,
    "answerable": _answerable,
    "difficulty": _difficulty,
    "mix": _remix,
    "both_knowledge": _both_knowledge,
    "rewriter": _rewriter,
    "chains": chains,
    "no_reasoning": no_reasoning,
}
