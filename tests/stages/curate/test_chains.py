"""ReaRAG's chains: built step by step with retries, or whole for the ablation."""

import dataclasses
import json
import unittest.mock

import pytest

from rsearch import train
from rsearch.config.stage_plan import DEMONSTRATIONS
from rsearch.data.demonstrations import load_demonstrations
from rsearch.protocols.base import Step
from rsearch.protocols.table import PROTOCOLS
from rsearch.setup.rollouts import replay_demonstrations
from rsearch.setup.weights import initial_params
from rsearch.stages.curate.rolling import JOURNAL
from rsearch.tools.search import search_call
from rsearch.types import (
    Answer,
)
from tests.small_run import config, load_setup, quick_compilation
from tests.stages.curate.test_run import check_sums, run, summary_of
from tests.stages.running import run_data
from tests.stages.scripted import Script, Stopped

__all__ = ["quick_compilation"]
SIZES = {
    "stages": ("curate",),
    "protocol__name": "rearag",
    "data__max_train": 6,
    "rollout__max_concurrent": 4,
    "rollout__max_prompt_tokens": 900,
    "rollout__max_turn_tokens": 120,
    "rollout__max_observation_tokens": 60,
    "rollout__max_searches": 3,
    "curate__method": "chains",
    "curate__max_steps": 5,
    "curate__max_retries": 4,
}


@pytest.fixture(scope="module")
def setup():
    return load_setup(config(**SIZES))


def with_fields(setup, **fields):
    return dataclasses.replace(setup, config=config(**{**SIZES, **fields}))


def draw_of(question):
    """Return (question id, steps so far, retries so far) from a sampled question."""
    name, _, draw = question.id.partition("#")
    return name, *map(int, draw.split("."))


def next_step(setup, name, number):
    """Return the right step `number` (from 1) of a question's chain."""
    hops = setup.world.hops[name]
    if number <= len(hops):
        action, thought = (
            search_call(hops[number - 1].subject),
            hops[number - 1].gap,
        )
    else:
        action, thought = Answer(hops[-1].object), "That is all."
    return setup.protocol.write(Step(number, thought, action))


def thinking(setup, *, flawed=0.0):
    """Return a script of right steps; with probability `flawed` one has no action."""

    def say(rng, question, conversation):
        if rng.random() < flawed:
            return "Thought: I am lost."
        name, num_steps, _ = draw_of(question)
        shown = conversation.segments[0].text.count("Action ")
        assert shown == num_steps  # the prompt holds the steps so far
        return next_step(setup, name, num_steps + 1)

    return say


def test_a_chain_is_built_step_by_step_and_replayed(setup, tmp_path):
    run(setup, tmp_path, Script(thinking(setup)))
    summary = summary_of(tmp_path)
    check_sums(summary, 6)
    assert summary["kept"] == 6
    made = load_demonstrations(tmp_path / DEMONSTRATIONS)
    for demonstration in made:
        hops = setup.world.hops[demonstration.question.id]
        assert len(demonstration.turns) == len(hops) + 1
        for hop, seen in zip(hops, demonstration.observations, strict=True):
            assert hop.fact in seen  # what the search has found
    path = str(tmp_path / DEMONSTRATIONS)
    sft = {"stages": ("sft",), "sft__demonstrations": path}
    recipe = config(**{**SIZES, **sft}, sft__sequence_tokens=5000)
    rollouts = replay_demonstrations(load_setup(recipe))
    assert [r.policy_texts for r in rollouts] == [d.turns for d in made]


def test_chains_are_made_under_one_prompt_and_learnt_under_another(tmp_path):
    """Sampling uses config.protocol.system (P_d), and learning the protocol's own P."""

    def worded(**fields):
        c = config(**{**SIZES, **fields})
        c.protocol.instruction = None  # the protocol's own messages
        return c

    making = load_setup(worded(protocol__system="Rules: reflect."))
    right = thinking(making)
    seen = []

    def say(rng, question, conversation):
        seen.append(conversation.segments[0].text)
        return right(rng, question, conversation)

    run(making, tmp_path, Script(say))
    learnt = PROTOCOLS["rearag"].system
    assert seen
    assert all("Rules: reflect." in text and learnt not in text for text in seen)
    path = str(tmp_path / DEMONSTRATIONS)
    assert "Rules: reflect." not in (tmp_path / DEMONSTRATIONS).read_text()
    sft = {"stages": ("sft",), "sft__demonstrations": path}
    learning = load_setup(worded(**sft, sft__sequence_tokens=5000))
    rollouts = replay_demonstrations(learning)
    assert len(rollouts) == 6
    for rollout in rollouts:
        assert learnt in rollout.segments[0].text
        assert not any("Rules: reflect." in s.text for s in rollout.segments)


def test_a_question_without_gold_passages_is_refused_before_loading_weights(
    tmp_path, monkeypatch
):
    weights = unittest.mock.Mock()
    monkeypatch.setattr(train, "initial_params", weights)
    rows = [{"id": "nq_0", "question": "d?", "golden_answers": ["x"]}]
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(rows[0]) + "\n")
    own = config(**SIZES, curate__observations="gold", data__train=str(path))
    with pytest.raises(ValueError, match=r"q\.jsonl:1: question nq_0: its gold passa"):
        train.main(own, tmp_path / "run")
    assert not weights.called and not (tmp_path / "run").exists()


def test_a_step_that_cannot_be_used_is_sampled_again(setup, tmp_path):
    patient = with_fields(setup, curate__max_retries=100)
    script = Script(thinking(setup, flawed=0.5))
    run(
        patient,
        tmp_path,
        script,
    )
    summary = summary_of(tmp_path)
    assert summary["kept"] == 6
    turns = sum(len(d.turns) for d in load_demonstrations(tmp_path / DEMONSTRATIONS))
    retries = summary["rollouts"] - turns
    assert retries > 0
    # Question, step and retry name a draw; no draw was sampled twice.
    names = [name for call in script.asked for name in call]
    assert len(set(names)) == len(names) == summary["rollouts"]


def test_retries_are_counted_over_the_whole_chain(setup, tmp_path):

    def say(rng, question, conversation):
        """Give two unusable replies at each step; two hops take three steps."""
        name, step, retry = draw_of(question)
        return "lost" if retry < 2 * (step + 1) else next_step(setup, name, step + 1)

    lengths = [len(setup.world.hops[q.id]) + 1 for q in setup.train]
    patient = with_fields(setup, curate__max_retries=2 * max(lengths))
    run(patient, tmp_path / "a", Script(say))
    assert summary_of(tmp_path / "a")["kept"] == 6
    strict = with_fields(setup, curate__max_retries=2 * min(lengths) - 1)
    with pytest.raises(
        ValueError, match="kept none of 6 questions: too many retries 6"
    ):
        run(strict, tmp_path / "b", Script(say))


def test_a_chain_has_at_most_max_steps_steps(setup, tmp_path):

    def say(rng, question, conversation):
        number = draw_of(question)[1] + 1
        return setup.protocol.write(Step(number, "", search_call("Ada")))

    script = Script(say)
    with pytest.raises(ValueError, match="too many steps 6"):
        run(setup, tmp_path, script)
    assert script.num_calls == 2 * 5  # two waves, five steps


def test_only_the_first_step_of_a_reply_is_used(setup, tmp_path):
    right = thinking(setup)

    def say(rng, question, conversation):
        """Continue with a made-up observation and another step."""
        said = right(rng, question, conversation)
        return f"{said}\nObservation 1: It is nobody.\nThought 2: So nobody."

    run(setup, tmp_path, Script(say))
    assert summary_of(tmp_path)["kept"] == 6
    for made in load_demonstrations(tmp_path / DEMONSTRATIONS):
        assert not any("nobody" in text for text in made.turns + made.observations)


def test_a_first_step_without_a_fence_is_cut_before_the_next_one(setup, tmp_path):
    """The stop string that ended the reply is that of a later step."""
    right = thinking(setup)

    def say(rng, question, conversation):
        head, call = right(rng, question, conversation).split(": \n```\n")
        nobody = setup.protocol.write(Step(9, "nobody", search_call("nobody")))
        observation = "\nObservation 1: nobody" * (rng.random() < 0.5)
        return f"{head}: {call.removesuffix('```')}{observation}\n{nobody}"

    run(setup, tmp_path, Script(say))
    assert summary_of(tmp_path)["kept"] == 6
    for made in load_demonstrations(tmp_path / DEMONSTRATIONS):
        assert not any("nobody" in text for text in made.turns + made.observations)


def test_gold_observations_are_the_passages_of_the_hops(setup, tmp_path):
    own = with_fields(setup, curate__observations="gold")
    own = dataclasses.replace(own, search=lambda queries: 1 / 0)  # never called
    run(own, tmp_path, Script(thinking(own)))
    for made in load_demonstrations(tmp_path / DEMONSTRATIONS):
        hops = own.world.hops[made.question.id]
        subjects = {hop.subject for hop in hops}
        for hop, seen in zip(hops, made.observations, strict=True):
            assert seen.partition("\n")[0] in subjects
            assert hop.fact in seen


def test_chains_with_the_same_query_see_their_own_passages(setup, tmp_path):
    own = with_fields(setup, curate__observations="gold")

    def say(rng, question, conversation):
        name, num_steps, _ = draw_of(question)
        hops = own.world.hops[name]
        if num_steps < 2:
            action = search_call("the same for all")
        else:
            action = Answer(hops[-1].object)
        return own.protocol.write(Step(num_steps + 1, "So.", action))

    run(own, tmp_path, Script(say))
    assert summary_of(tmp_path)["kept"] == 6
    seen = set()
    for made in load_demonstrations(tmp_path / DEMONSTRATIONS):
        subjects = {hop.subject for hop in own.world.hops[made.question.id]}
        titles = {text.partition("\n")[0] for text in made.observations}
        assert len(titles) == 1 and titles <= subjects
        seen |= titles
    assert len(seen) > 1


def test_an_interrupted_stage_of_chains_ends_with_the_same_files(setup, tmp_path):
    say = thinking(setup, flawed=0.3)
    whole = Script(say)
    wanted = run(setup, tmp_path / "a", whole)
    first_wave = next(i for i, call in enumerate(whole.asked) if len(call) < 4)
    assert 0 < first_wave < whole.num_calls - 1
    for stop_after in (1, whole.num_calls - 1):
        folder = tmp_path / f"b{stop_after}"
        with pytest.raises(Stopped):
            run(setup, folder, Script(say, stop_after))
        assert run(setup, folder, Script(say)) == wanted
    assert len(wanted[JOURNAL].splitlines()) == 2


def test_an_untrained_policy_runs_out_of_retries(setup, tmp_path):
    """The sampler runs with random weights, so no step can be used."""
    own = with_fields(setup, curate__max_retries=1)
    limits = dataclasses.replace(own.limits, max_turn_tokens=4)
    own = dataclasses.replace(own, limits=limits)
    with pytest.raises(
        ValueError, match="kept none of 6 questions: too many retries 6"
    ):
        run_data(own, initial_params(own), tmp_path)


def test_the_ablation_writes_whole_chains_from_the_decompositions(setup, tmp_path):
    own = dataclasses.replace(
        setup, config=config(**{**SIZES, "curate__method": "no_reasoning"})
    )
    seen = []

    def say(rng, question, conversation):
        seen.append(conversation.segments[0].text)
        hops = own.world.hops[question.id]
        if question.id == own.train[0].id:
            return "I do not know."
        steps = [
            f"{next_step(own, question.id, i)}\nObservation {i}: {hop.fact}"
            for i, hop in enumerate(hops, 1)
        ]
        last = next_step(own, question.id, len(hops) + 1)
        return "\n".join([*steps, last, "<|completed|>"])

    run(own, tmp_path, Script(say))
    summary = summary_of(tmp_path)
    check_sums(summary, 6)
    assert {r["verdict"]: r["questions"] for r in summary["verdicts"]} == {
        "kept": 5,
        "unfinished": 1,
    }
    for made in load_demonstrations(tmp_path / DEMONSTRATIONS):
        hops = own.world.hops[made.question.id]
        assert made.observations == tuple(hop.fact for hop in hops)
    hops = own.world.hops[own.train[1].id]
    told = json.dumps(hops[0].object, ensure_ascii=False)
    assert any(told in prompt and "Decompositions" in prompt for prompt in seen)
