"""The data stage that writes gold searches: its files, restarts and refusals."""

import json

import pytest

from configs import base
from rsearch import train
from rsearch.config.stage_plan import DEMONSTRATIONS, SUMMARY
from rsearch.data.demonstrations import load_demonstrations
from rsearch.models.small_tokenizer import train_tokenizer
from rsearch.protocols.table import PROTOCOLS
from rsearch.rollout.conversation import Host, Limits
from rsearch.rollout.replay import replay
from rsearch.stages.curate import run as curate
from rsearch.stages.curate.rolling import JOURNAL, DataStage
from rsearch.types import Answer, Passage, Question, ToolCall
from tests.small_run import config, quick_compilation

__all__ = ["quick_compilation"]

NAMES = ["Anna Berg", "Olof Dahl", "Ida Falk", "Nils Gran"]
PASSAGES = {
    title: Passage(title, f'"{title}"\n{text}')
    for name in NAMES
    for title, text in [
        (name, f"{name} was a painter, whose mother was Eva {name.split()[1]}."),
        (f"Eva {name.split()[1]}", f"She was born in {name[:2]}stad by the sea."),
    ]
}
QUESTIONS = [
    Question(
        name,
        f"Where was the mother of {name} born?",
        (f"{name[:2]}stad",),
        {"supporting_titles": [name, f"Eva {name.split()[1]}"]},
    )
    for name in NAMES
]
TOKENIZER = train_tokenizer(["She was born. "] * 3, vocab_size=300)


def search(queries):
    """Return the passage titled like each query, or one that does not help."""
    other = (Passage("0", '"Paris"\nParis lies in France.'),)
    return [(PASSAGES[q],) if q in PASSAGES else other for q in queries]


def stage(folder, *, protocol="search_r1", find=search, turn=300, shown=200, **fields):
    """Return the stage over these questions, with one question in each wave."""
    recipe = base.get_config()
    recipe.protocol.name = protocol
    recipe.rollout.max_concurrent = 1
    recipe.curate.method = "oracle"
    recipe.curate.recover_share = 0.5
    recipe.curate.update(fields)
    limits = Limits(3, 4000, turn, shown)
    protocol = PROTOCOLS[protocol]
    return DataStage(
        config=recipe,
        name="curate",
        folder=folder,
        params=None,
        questions=QUESTIONS,
        protocol=protocol,
        tokenizer=TOKENIZER,
        limits=limits,
        num_tokens=0,
        max_context=0,
        world=None,
        search=find,
        open_encoder=None,
        make_host=lambda search: Host(TOKENIZER, protocol, search, limits),
        make_rollouts=None,
    )


def summary_of(folder):
    return json.loads((folder / SUMMARY).read_bytes())


CAN = [name for name, protocol in PROTOCOLS.items() if protocol.evidence_tag is None]


@pytest.mark.parametrize("protocol", CAN)
def test_gold_searches_are_demonstrated_in_any_protocol(tmp_path, protocol):
    made = stage(tmp_path, protocol=protocol)
    curate.run(made)
    kinds = summary_of(tmp_path)["demonstration_kinds"]
    assert kinds == {"searches: 2": 2, "searches: 3, recovered": 2}
    host = made.make_host(search)
    for question, demonstration in zip(
        QUESTIONS, load_demonstrations(tmp_path / DEMONSTRATIONS), strict=True
    ):
        rollout = replay(host, question, demonstration.turns)
        assert rollout.answer == question.golden_answers[0]
        titles = {p.title.strip('"') for p in rollout.passages}
        assert titles >= set(question.metadata["supporting_titles"])
        *calls, answer = map(made.protocol.parse, demonstration.turns)
        assert all(isinstance(call, ToolCall) for call in calls)
        assert isinstance(answer, Answer)


def test_a_resumed_stage_searches_only_for_the_rest_and_ends_the_same(tmp_path):
    searched = []

    def stopping(queries):
        if len(searched) == 2:
            raise KeyboardInterrupt
        searched.append(queries)
        return search(queries)

    for name in ("first", "again"):
        (tmp_path / name).mkdir()
    with pytest.raises(KeyboardInterrupt):
        curate.run(stage(tmp_path / "first", find=stopping))
    searched.clear()
    curate.run(stage(tmp_path / "first", find=stopping))
    assert len(searched) == 2  # of four waves
    curate.run(stage(tmp_path / "again"))
    for name in (DEMONSTRATIONS, SUMMARY, JOURNAL):
        first, again = (tmp_path / x / name for x in ("first", "again"))
        assert first.read_bytes() == again.read_bytes()


def test_a_search_that_takes_question_ids_gets_those_of_its_queries(tmp_path):
    def find(queries, question_ids):
        # A question finds nothing of another question's.
        own = {name: {name, f"Eva {name.split()[1]}"} for name in NAMES}
        return [
            (PASSAGES[q],) if q in own[name] else search([""])[0]
            for q, name in zip(queries, question_ids, strict=True)
        ]

    find.wants_question_ids = True
    for name, engine in (("ids", find), ("all", search)):
        (tmp_path / name).mkdir()
        curate.run(stage(tmp_path / name, find=engine))
    for name in (DEMONSTRATIONS, SUMMARY, JOURNAL):
        first, second = (tmp_path / x / name for x in ("ids", "all"))
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_configured_share_recovers_from_a_missed_search(tmp_path, share):
    curate.run(stage(tmp_path, recover_share=share))
    kinds = summary_of(tmp_path)["demonstration_kinds"]
    assert kinds.get("searches: 3, recovered", 0) == 4 * share


@pytest.mark.parametrize(
    ("searches", "queries"), [("question", [QUESTIONS[0].text]), ("none", [])]
)
def test_controls_answer_the_same_questions_with_fewer_searches(
    tmp_path, searches, queries
):
    # The question as a query misses the answer's passage, but is answered anyway.
    made = stage(tmp_path, searches=searches)
    curate.run(made)
    demonstrations = load_demonstrations(tmp_path / DEMONSTRATIONS)
    assert [d.question.id for d in demonstrations] == [q.id for q in QUESTIONS]
    actions = [made.protocol.parse(turn) for turn in demonstrations[0].turns]
    assert actions == [
        *(ToolCall("search", (query,)) for query in queries),
        Answer(QUESTIONS[0].golden_answers[0]),
    ]


@pytest.mark.parametrize(
    ("budgets", "reason"), [({"turn": 9}, "too long"), ({"shown": 20}, "cut off")]
)
def test_demonstrations_over_budget_are_dropped_and_counted(tmp_path, budgets, reason):
    with pytest.raises(ValueError, match=f"none of 4 questions: {reason} 4"):
        curate.run(stage(tmp_path, **budgets))


@pytest.mark.slow
def test_a_run_of_only_this_stage_ends_without_results(tmp_path):
    sizes = {"turn_tokens": 90, "observation_tokens": 60, "searches": 4}
    recipe = config(
        stages=("curate",),
        curate__method="oracle",
        eval__at_start=False,
        **{f"rollout__max_{name}": size for name, size in sizes.items()},
    )
    assert train.main(recipe, tmp_path) == []
    # The embedded world knows the gold passages of its questions.
    assert summary_of(tmp_path / "curate")["kept"] > 0


def test_a_protocol_that_requires_evidence_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.protocol\.name = 'r_search'"):
        curate.run(stage(tmp_path, protocol="r_search"))
