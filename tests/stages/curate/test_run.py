"""The data stages: their files, counts that add up, and restarts."""

import dataclasses
import errno
import json
import pathlib

import pytest

from rsearch.config.stage_plan import DEMONSTRATIONS, QUESTIONS, SUMMARY, round_size
from rsearch.data.demonstrations import load_demonstrations
from rsearch.data.questions import load_questions
from rsearch.protocols.base import Step
from rsearch.runtime import console, files
from rsearch.setup.rollouts import make_rollouts, replay_demonstrations
from rsearch.setup.weights import initial_params
from rsearch.stages.curate import run as curate
from rsearch.stages.curate.rolling import JOURNAL
from rsearch.tools.search import search_call
from rsearch.types import (
    Answer,
    Source,
)
from tests.small_run import config, load_setup, quick_compilation
from tests.stages.running import run_data
from tests.stages.scripted import Script, Stopped

__all__ = ["quick_compilation"]
SIZES = {
    "stages": ("curate",),
    "data__max_train": 14,
    "rollout__max_concurrent": 1,
    "rollout__max_turn_tokens": 60,
    "rollout__max_searches": 3,
    "curate__measure": "em",
}


@pytest.fixture(scope="module")
def setup():
    return load_setup(config(**SIZES))


def with_fields(setup, **fields):
    """Return the setup with other settings, ones that its parts do not depend on."""
    return dataclasses.replace(setup, config=config(**SIZES | fields))


def answers(setup, how_often):
    """Return a script that searches hop by hop and then answers, sometimes wrongly.

    Args:
        setup: setup with the world of the questions.
        how_often: function from a question's number in the stage to the probability of
            a right answer.
    """
    place = {q.id: i for i, q in enumerate(setup.train)}

    def say(rng, question, conversation):
        hops = setup.world.hops[question.id]
        number = len(conversation.tool_uses)
        if number < len(hops):
            action = search_call(hops[number].subject)
            said = hops[number].gap
        else:
            is_right = rng.random() < how_often(place[question.id])
            action = Answer(question.golden_answers[0] if is_right else "nobody")
            said = hops[-1].fact
        return setup.protocol.write(Step(number + 1, said, action, "I recall it."))

    return say


def run(setup, folder, script, *, stage="curate"):
    """Run the stage with this script; return its files as {name: bytes}."""
    folder.mkdir(parents=True, exist_ok=True)
    run_data(setup, {}, folder, name=stage, make_rollouts=script)
    paths = [path for path in folder.iterdir() if path.suffix != ".damaged"]
    return {path.name: path.read_bytes() for path in paths}


def summary_of(folder):
    return json.loads((folder / SUMMARY).read_bytes())


def check_sums(summary, num_questions):
    """Check that every table of the summary adds up to its total."""
    assert summary["questions"] == num_questions
    for name in ("questions", "kept", "rollouts"):
        assert summary[name] == sum(row[name] for row in summary["verdicts"])
        if summary["question_kinds"]:
            parts = summary["question_kinds"].values()
            assert summary[name] == sum(row[name] for row in parts)
    total = sum(summary["demonstration_kinds"].values())
    assert summary["demonstrations"] == total


def often(number):
    """Return a right answer's probability: 0 for question 0, rising to 1."""
    return number / 13


def test_segments_are_written_replayed_and_add_up(setup, tmp_path, capsys):
    script = Script(answers(setup, often))
    run(setup, tmp_path, script)
    summary = summary_of(tmp_path)
    check_sums(summary, 14)
    assert {row["verdict"] for row in summary["verdicts"]} == {"kept", "wrong"}
    assert summary["rollouts"] == 14  # one for each question
    kinds = summary["demonstration_kinds"]
    ends = {"answer_from_retrieved", "search_from_retrieved"}
    assert set(kinds) <= {"search_from_question", *ends}
    # Each kept rollout opens with a search and ends with one answer.
    assert kinds["search_from_question"] == kinds["answer_from_retrieved"]
    assert kinds["search_from_question"] == summary["kept"] > 0
    assert "wrong" in capsys.readouterr().out
    made = load_demonstrations(tmp_path / DEMONSTRATIONS)
    assert len(made) == summary["demonstrations"]
    assert all(d.context_turns == len(d.turns) - 1 for d in made)
    path = str(tmp_path / DEMONSTRATIONS)
    recipe = config(
        **{**SIZES, "stages": ("sft",)},
        sft__demonstrations=path,
        sft__sequence_tokens=999,
    )
    rollouts = replay_demonstrations(load_setup(recipe))
    learnt = [r.policy_texts for r in rollouts]
    assert learnt == [(d.turns[-1],) for d in made]
    # A segment does not include the results of its last search.
    assert all(r.segments[-1].source == Source.POLICY for r in rollouts)


def test_rollouts_kept_uncut_are_learnt_turn_by_turn(setup, tmp_path):
    own = with_fields(setup, curate__method="whole", curate__rollouts=2)
    run(own, tmp_path, Script(answers(setup, often)))
    summary = summary_of(tmp_path)
    check_sums(summary, 14)
    made = load_demonstrations(tmp_path / DEMONSTRATIONS)
    assert len(made) == summary["kept"] > 0
    assert all(d.context_turns == 0 and not d.is_segment for d in made)
    recipe = config(
        **{**SIZES, "stages": ("sft",)},
        sft__demonstrations=str(tmp_path / DEMONSTRATIONS),
        sft__sequence_tokens=999,
    )
    rollouts = replay_demonstrations(load_setup(recipe))
    assert [r.policy_texts for r in rollouts] == [d.turns for d in made]


METHODS = {
    "segments": {"rollouts": 3},
    "answerable": {"retry_rollouts": 3, "retry_searches": 4},
    "difficulty": {"rollouts": 5, "easy_below": 2, "hard_above": 3},
    "both_knowledge": {"rollouts": 3},
}


@pytest.mark.fault(40, "every stage")
@pytest.mark.parametrize("method", METHODS)
def test_a_stage_that_was_stopped_anywhere_ends_with_the_same_files(
    setup, tmp_path, method
):
    own = {f"curate__{name}": value for name, value in METHODS[method].items()}
    if method == "both_knowledge":
        own["protocol__name"] = "r1_searcher_pp"
        setup = load_setup(config(**SIZES, curate__method=method, **own))
    else:
        setup = with_fields(setup, curate__method=method, **own)
    say = answers(setup, often)
    whole = Script(say)
    wanted = run(setup, tmp_path / "a", whole)
    check_sums(summary_of(tmp_path / "a"), 14)
    assert whole.num_calls > 4
    for stop_after in (0, 1, whole.num_calls // 2, whole.num_calls - 1):
        folder = tmp_path / f"b{stop_after}"
        with pytest.raises(Stopped):
            run(setup, folder, Script(say, stop_after))
        assert not curate.is_finished(folder)
        with open(folder / JOURNAL, "ab") as file:
            file.write(b'{"pass": "first", "rou')  # cut off during a write
        rest = Script(say)
        assert run(setup, folder, rest) == wanted
        assert rest.num_calls == whole.num_calls - stop_after


@pytest.mark.fault(21, "full", "retried")
def test_a_stage_waits_for_room_on_a_full_disk(setup, tmp_path, monkeypatch, capsys):
    setup = with_fields(setup, curate__method="segments")
    say = answers(setup, often)
    wanted = run(setup, tmp_path / "a", Script(say))
    capsys.readouterr()
    refused = []

    def refusing(write):
        def refuse_once(target, data):
            path = pathlib.Path(getattr(target, "name", target))
            if path.name not in refused:
                refused.append(path.name)
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return write(target, data)

        return refuse_once

    monkeypatch.setattr(console, "RETRY_WAITS", (0.01, 0.01))
    monkeypatch.setattr(files, "append", refusing(files.append))
    monkeypatch.setattr(files, "replace", refusing(files.replace))
    assert run(setup, tmp_path / "b", Script(say)) == wanted
    assert refused == [JOURNAL, DEMONSTRATIONS, SUMMARY]
    assert capsys.readouterr().err.count("retrying") == 3


def test_a_finished_stage_does_nothing(setup, tmp_path):
    assert not curate.is_finished(tmp_path)
    script = Script(answers(setup, often))
    files = run(setup, tmp_path, script)
    assert curate.is_finished(tmp_path)
    calls = script.num_calls
    assert run(setup, tmp_path, script) == files
    assert script.num_calls == calls


def test_answerable_keeps_wrong_ones_that_a_retry_solves_and_some_right_ones(
    setup, tmp_path
):
    own = with_fields(
        setup,
        curate__method="answerable",
        curate__retry_rollouts=6,
        curate__retry_searches=5,
        curate__retry_temperature=1.25,
        rollout__temperature=0.5,
    )
    script = Script(answers(setup, often))
    run(own, tmp_path, script)
    # (temperature, searches, group size): groups have at most 2 rollouts.
    assert script.made == [(0.5, 3, 1), (1.25, 5, 2)]
    summary = summary_of(tmp_path)
    check_sums(summary, 14)
    count = {row["verdict"]: row["questions"] for row in summary["verdicts"]}
    assert count["wrong, unanswerable"] >= 1  # question 0
    right = count["right, drawn"] + count["right, not drawn"]
    assert count["right, drawn"] == round(0.25 * right)
    kept, problems = load_questions(tmp_path / QUESTIONS)
    assert len(kept) == count["right, drawn"] + count["wrong, answerable"]
    known = {q.id: q for q in setup.train}
    assert not problems and all(known[q.id] == q for q in kept)
    assert setup.train[0].id not in {q.id for q in kept}


def test_without_retries_all_wrong_ones_are_kept(setup, tmp_path):
    own = with_fields(setup, curate__method="answerable", curate__retry_rollouts=0)
    script = Script(answers(setup, lambda number: float(number > 3)))
    run(own, tmp_path, script)
    summary = summary_of(tmp_path)
    check_sums(summary, 14)
    count = {row["verdict"]: row["kept"] for row in summary["verdicts"]}
    assert count["wrong, not retried"] == 4
    assert count["right, drawn"] == round(0.25 * 10)
    assert summary["rollouts"] == 14


def test_questions_whose_tools_failed_are_neither_right_nor_wrong(setup, tmp_path):
    """One question fails in every search, another in all but its first search."""
    once, ever = (setup.world.hops[q.id][0].subject for q in setup.train[1:3])
    heard = []

    def search(queries):
        heard.extend(queries)
        actual = setup.search(queries)
        fails = [q == ever or (q == once and heard.count(q) > 1) for q in queries]
        return [None if f else hits for f, hits in zip(fails, actual, strict=True)]

    own = with_fields(setup, curate__method="answerable", curate__retry_rollouts=2)
    own = dataclasses.replace(own, search=search)
    script = Script(answers(setup, lambda number: float(number > 2)))
    run(own, tmp_path, script)
    summary = summary_of(tmp_path)
    check_sums(summary, 14)
    count = {row["verdict"]: row["rollouts"] for row in summary["verdicts"]}
    shares = {name: count.pop(name) for name in ("right, drawn", "right, not drawn")}
    assert sum(shares.values()) == 11
    # Question 0 is retried and still wrong; question 2 is not retried.
    assert count == {
        "wrong, unanswerable": 1 + 2,
        "wrong, tools failed": 1 + 2,
        "tools failed": 1,
    }


@pytest.mark.parametrize(
    "whole, most, size", [(8, 10, 8), (8, 6, 4), (8, 3, 2), (5, 3, 1), (1, 10, 1)]
)
def test_the_group_size_divides_the_number_of_rollouts(whole, most, size):
    assert round_size(whole, most) == size


def test_a_stage_may_resume_with_another_number_of_slots(setup, tmp_path):
    fields = {"curate__method": "difficulty", "curate__rollouts": 3}
    fields |= {"curate__easy_below": 2, "curate__hard_above": 2}
    own, more, most = (
        with_fields(
            setup, rollout__group_size=4, rollout__max_concurrent=slots, **fields
        )
        for slots in (1, 2, 3)  # one slot is less than a group
    )
    say = answers(setup, often)
    wanted = run(own, tmp_path / "a", Script(say))
    for folder, other in (("b", more), ("c", most)):
        with pytest.raises(Stopped):
            run(own, tmp_path / folder, Script(say, 3))
        actual = run(other, tmp_path / folder, Script(say))
        assert all(actual[name] == wanted[name] for name in (QUESTIONS, SUMMARY))


def test_first_rollouts_are_reused_from_another_stage(setup, tmp_path):
    twice = with_fields(setup, curate__rollouts=2)
    run(twice, tmp_path / "curate_sft", Script(answers(setup, often)))
    own = with_fields(
        setup, curate__method="answerable", curate__first="stage:curate_sft"
    )
    script = Script(answers(setup, often))
    run(own, tmp_path / "curate_rl", script, stage="curate_rl")
    assert len(script.made) == 1  # only the retries
    first, second = (summary_of(tmp_path / s) for s in ("curate_sft", "curate_rl"))
    count = {row["verdict"]: row["questions"] for row in second["verdicts"]}
    right = count["right, drawn"] + count["right, not drawn"]
    assert right == first["kept"]


def test_a_missing_first_stage_is_named(setup, tmp_path):
    own = with_fields(setup, curate__first="stage:curate_x")
    with pytest.raises(
        ValueError, match=r"curate\.first = 'stage:curate_x': .*missing"
    ):
        run(own, tmp_path, Script(answers(setup, often)))


def test_difficulty_counts_rollouts_and_a_later_mix_needs_none(setup, tmp_path):
    bounds = {"curate__easy_below": 2, "curate__hard_above": 3, "curate__rollouts": 6}
    own = with_fields(setup, curate__method="difficulty", **bounds)
    run(own, tmp_path / "curate_a", Script(answers(setup, often)))
    check_sums(summary_of(tmp_path / "curate_a"), 14)
    kept, _ = load_questions(tmp_path / "curate_a" / QUESTIONS)
    assert len(kept) == 14
    wanted = {1: "easy", 2: "medium", 3: "medium", 4: "hard", 5: "hard", 6: "hard"}
    for question in kept:
        needed = question.metadata["rollouts_needed"]
        assert question.metadata["difficulty"] == wanted.get(needed, "hard")
    assert kept[0].metadata["rollouts_needed"] is None
    levels = [q.metadata["difficulty"] for q in kept]
    again = with_fields(
        setup,
        curate__method="mix",
        curate__first="stage:curate_a",
        curate__mix=("hard 1", "medium 99"),
        **bounds,
    )
    script = Script(None)
    run(again, tmp_path / "curate_b", script, stage="curate_b")
    assert not script.made
    taken, _ = load_questions(tmp_path / "curate_b" / QUESTIONS)
    actual = [q.metadata["difficulty"] for q in taken]
    assert actual.count("hard") == 1
    assert actual.count("medium") == levels.count("medium") == len(actual) - 1
    (note,) = summary_of(tmp_path / "curate_b")["notes"]
    assert f"of {levels.count('medium')} questions" in note


def test_a_mix_of_an_unknown_dataset_is_refused_before_any_rollout(setup, tmp_path):
    own = with_fields(
        setup, curate__method="difficulty", curate__mix=("hotpotqa hard 1",)
    )
    script = Script(answers(setup, often))
    with pytest.raises(ValueError, match=r"mix: 'hotpotqa hard 1'.*data_source"):
        run(own, tmp_path, script)
    assert not script.made


def test_a_question_with_too_few_rollouts_without_a_failure_has_no_difficulty(
    setup, tmp_path
):
    """One question fails in all but its first two searches, so 2 rollouts count."""
    failing, heard = setup.world.hops[setup.train[1].id][0].subject, []

    def search(queries):
        heard.extend(queries)
        fails = [q == failing and heard.count(q) > 2 for q in queries]
        actual = setup.search(queries)
        return [None if f else hits for f, hits in zip(fails, actual, strict=True)]

    bounds = {"curate__easy_below": 2, "curate__hard_above": 3, "curate__rollouts": 4}
    own = with_fields(setup, curate__method="difficulty", **bounds)
    own = dataclasses.replace(own, search=search)
    run(own, tmp_path, Script(answers(setup, lambda number: float(number > 2))))
    count = {v["verdict"]: v["questions"] for v in summary_of(tmp_path)["verdicts"]}
    assert count == {"easy": 11, "hard": 2, "no level, not taken": 1}


def test_questions_that_are_never_right_can_be_left_out(setup, tmp_path):
    own = with_fields(
        setup,
        curate__method="difficulty",
        curate__rollouts=2,
        curate__keep_unsolved=False,
    )
    run(own, tmp_path, Script(answers(setup, lambda i: float(i > 4))))
    kept, _ = load_questions(tmp_path / QUESTIONS)
    assert [q.id for q in kept] == [q.id for q in setup.train[5:]]


def test_at_most_max_kept_questions_are_kept(setup, tmp_path):
    own = with_fields(setup, curate__max_kept=3)
    run(own, tmp_path, Script(answers(setup, lambda i: 1.0)))
    summary = summary_of(tmp_path)
    check_sums(summary, 14)
    assert summary["kept"] == 3
    made = load_demonstrations(tmp_path / DEMONSTRATIONS)
    assert len({d.question.id for d in made}) == 3


def test_keeping_nothing_is_an_error_that_gives_the_reasons(setup, tmp_path):
    with pytest.raises(ValueError, match="kept none of 14 questions: wrong 14"):
        run(setup, tmp_path, Script(answers(setup, lambda i: 0.0)))
    assert not curate.is_finished(tmp_path)


def test_the_rewriter_learns_from_the_passages_found(tmp_path):
    sizes = {**SIZES, "protocol__name": "r1_searcher_pp"}
    rewrite = "{document}\nReword: {question}"
    setup = load_setup(
        config(**sizes, curate__method="rewriter", protocol__rewrite=rewrite)
    )
    run(setup, tmp_path, Script(answers(setup, often)))
    summary = summary_of(tmp_path)
    check_sums(summary, 14)
    assert summary["demonstration_kinds"] == {"reworded": summary["kept"]}
    known = {q.id: q for q in setup.train}
    for made in load_demonstrations(tmp_path / DEMONSTRATIONS):
        (message,) = made.messages
        documents, _, asked = message["content"].partition("\nReword: ")
        question = known[made.question.id]
        assert asked == question.text
        assert setup.world.hops[question.id][0].subject in documents
        assert setup.protocol.parse(made.turns[0]) == Answer(question.golden_answers[0])


def test_a_real_policy_gives_the_same_files_after_a_stop(setup, tmp_path):
    """With random weights no answer is right, so all questions are hard."""
    bounds = {"curate__easy_below": 2, "curate__hard_above": 3, "curate__rollouts": 3}
    own = with_fields(setup, curate__method="difficulty", **bounds)
    limits = dataclasses.replace(own.limits, max_turn_tokens=8, max_searches=1)
    own = dataclasses.replace(own, limits=limits)
    params = initial_params(own)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    run_data(own, params, tmp_path / "a")

    def breaking(*args, **kwargs):
        engine, calls = make_rollouts(own, *args, **kwargs), []

        def roll(*given):
            calls.append(0)
            if len(calls) == 6:
                raise Stopped
            return engine(*given)

        roll.place_params = engine.place_params
        return roll

    with pytest.raises(Stopped):
        run_data(own, params, tmp_path / "b", make_rollouts=breaking)
    run_data(own, params, tmp_path / "b")
    for name in (JOURNAL, QUESTIONS, SUMMARY):
        assert (tmp_path / "a" / name).read_bytes() == (
            tmp_path / "b" / name
        ).read_bytes()
    assert summary_of(tmp_path / "a")["verdicts"][0]["verdict"] == "hard"
