"""Plans from gold annotations: the order of the searches, and dropped questions."""

import dataclasses

import pytest

from rsearch.data.oracle import GoldHop, gold_hops, is_shown, plan, plan_queries
from rsearch.protocols.base import Step
from rsearch.types import Answer, Passage, Question

KARL = Passage("1", '"Karl (prince)"\nKarl, a prince, was the son of Emich Leiningen.')
EMICH = Passage("2", '"Emich Leiningen"\nEmich was born on January 18, 1866.')
SILENT = Passage("1", '"Karl (prince)"\nKarl was a prince.')
OTHER = Passage("3", '"Paris"\nParis lies in France.')
GOLD = {"supporting_titles": ["Emich Leiningen", "Karl (prince)"]}
TRIPLES = [
    ["Karl (prince)", "father", "Emich"],
    ["Emich Leiningen", "date of birth", "18 January 1866"],
]
BORN = Question("q", "When was Karl's father born?", ("18 January 1866",), GOLD)
TRIED = Question("q", BORN.text, BORN.golden_answers, {**GOLD, "evidences": TRIPLES})


def planned(question, lookup, *, recovers=False, default=(OTHER,)):
    """Return a plan's actions, fault and thoughts; other queries find `default`."""
    hops = gold_hops(question)
    hits = {q: lookup.get(q, default) for q in plan_queries(question, hops)}
    steps, fault = plan(
        question, hops, hits, recovers=recovers, normalize="squad", order="any"
    )
    said = [
        a.text if isinstance(a, Answer) else a.arguments[0]
        for a in (step.action for step in steps)
    ]
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    return said, fault, " ".join(step.thought for step in steps)


@pytest.mark.parametrize(
    ("question", "lookup", "expected"),
    [
        (  # titles that the question names come first, whatever the annotation's order
            BORN,
            {"Karl": (KARL,), "Emich Leiningen": (EMICH,)},
            ["Karl", "Emich Leiningen", "18 January 1866"],
        ),
        (  # triples add relations to the queries
            TRIED,
            {
                "Karl father": (KARL,),
                "Emich Leiningen date of birth": (OTHER, EMICH),
            },
            ["Karl father", "Emich Leiningen date of birth", "18 January 1866"],
        ),
        (  # of a passage's queries, the one that ranks it best is used
            TRIED,
            {
                "Karl prince": (KARL,),
                "Emich Leiningen date of birth": (OTHER, EMICH),
                "Emich Leiningen": (EMICH,),
            },
            ["Karl prince", "Emich Leiningen", "18 January 1866"],
        ),
        # A passage that has been read is not searched for again.
        (BORN, {"Karl": (KARL, EMICH)}, ["Karl", "18 January 1866"]),
    ],
)
def test_gold_passages_are_searched_in_an_order_that_a_reader_could_follow(
    question, lookup, expected
):
    queries, fault, _ = planned(question, lookup)
    assert (queries, fault) == (expected, "")


def test_thoughts_state_the_facts_read_and_the_next_goal():
    lookup = {"Karl father": (KARL,), "Emich Leiningen date of birth": (EMICH,)}
    _, _, thoughts = planned(TRIED, lookup)
    assert "I need to find the father of Karl." in thoughts
    assert "The father of Karl is Emich." in thoughts
    assert "The date of birth of Emich Leiningen is 18 January 1866." in thoughts


def test_a_thought_about_passages_begins_with_the_question():
    lookup = {"Karl": (KARL,), "Emich Leiningen": (EMICH,)}
    _, _, thoughts = planned(BORN, lookup, recovers=True)
    # Three searches give three thoughts: on the miss and on the two passages.
    assert thoughts.count(f"Question: {BORN.text} ") == 3
    assert f"Question: {BORN.text} This does not help. I need" in thoughts


def test_the_last_thought_names_the_facts_of_all_searches_once():
    lookup = {"Karl father": (KARL,), "Emich Leiningen date of birth": (EMICH,)}
    _, _, thoughts = planned(TRIED, lookup)
    last = thoughts.rpartition("Question: ")[2]
    assert last == (
        f"{BORN.text} The father of Karl is Emich. "
        "The date of birth of Emich Leiningen is 18 January 1866. "
        "The answer is 18 January 1866."
    )


def test_a_question_that_names_no_title_becomes_the_query():
    lost = dataclasses.replace(BORN, text="When was his father born?")
    lookup = {lost.text: (KARL,), "Emich Leiningen": (EMICH,)}
    queries, fault, _ = planned(lost, lookup)
    assert queries == [lost.text, "Emich Leiningen", "18 January 1866"]
    assert not fault


def test_a_plan_recovers_from_a_search_that_misses():
    lookup = {"Karl": (KARL,), "Emich Leiningen": (EMICH,)}
    queries, fault, _ = planned(BORN, lookup, recovers=True)
    assert queries == [BORN.text, "Karl", "Emich Leiningen", "18 January 1866"]
    assert not fault
    # If one of the two is found, the other is searched for next.
    queries, _, _ = planned(BORN, lookup | {BORN.text: (KARL,)}, recovers=True)
    assert queries == [BORN.text, "Emich Leiningen", "18 January 1866"]
    queries, fault, _ = planned(
        BORN, lookup | {BORN.text: (KARL, EMICH)}, recovers=True
    )
    assert not queries and fault


@pytest.mark.parametrize(
    ("question", "lookup", "reason"),
    [
        (dataclasses.replace(BORN, metadata={}), {}, "no gold titles"),
        (BORN, {"Karl": None}, "search failed"),
        (BORN, {}, "gold passage not found"),
        (BORN, {"Karl": (SILENT,)}, "gold title named nowhere"),
        (
            dataclasses.replace(BORN, golden_answers=("1912",)),
            {"Karl": (KARL, EMICH)},
            "answer in no passage",
        ),
    ],
)
def test_questions_whose_facts_cannot_be_found_or_read_are_dropped(
    question, lookup, reason
):
    queries, fault, _ = planned(question, lookup)
    assert (queries, fault) == ([], reason)


def test_yes_and_no_answers_need_no_passage():
    question = dataclasses.replace(BORN, golden_answers=("No",))
    queries, fault, _ = planned(question, {"Karl": (KARL, EMICH)})
    assert (queries, fault) == (["Karl", "No"], "")


@pytest.mark.parametrize(
    ("evidences", "relations"),
    [
        (TRIPLES, ["date of birth", "father"]),
        ([["Karl Prince", "father", "Emich"]], ["", "father"]),  # nearly the title
        ([["Otto", "father", "Emich"]], ["", ""]),
        ([["Karl (prince)", "father"], 7], ["", ""]),
        ([["Karl (prince)", " ", "Emich"]], ["", ""]),
        ([["Karl (prince)", "date\n of  birth ", "1890"]], ["", "date of birth"]),
        ("text", ["", ""]),
    ],
)
def test_a_hops_relation_is_the_one_of_its_title(evidences, relations):
    question = dataclasses.replace(BORN, metadata={**GOLD, "evidences": evidences})
    assert [hop.relation for hop in gold_hops(question)] == relations


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # The sentence that names the next title is repeated, not another one.
        (
            "Karl was a prince. His father was Emich Leiningen. He died.",
            'The passage on Karl says: "His father was Emich Leiningen."',
        ),
        # Of several, the one that shares words with the question beyond the titles.
        (
            "Karl knew Emich Leiningen. Emich Leiningen saw him born.",
            'The passage on Karl says: "Emich Leiningen saw him born."',
        ),
        (
            f"His father was Emich Leiningen, {'a prince and ' * 20}a count.",
            "The passage on Karl mentions Emich Leiningen.",
        ),
        ("Karl was a prince. He died.", 'Karl says: "Karl was a prince."'),
        ("Karl was a prince. They were born.", 'Karl says: "They were born."'),
        (f"Karl was {'very ' * 40}old.", "I have read about Karl."),
    ],
)
def test_a_thought_repeats_a_sentence_if_no_relation_is_known(text, said):
    karl = dataclasses.replace(KARL, contents=f'"Karl (prince)"\n{text}')
    metadata = {"supporting_titles": GOLD["supporting_titles"][::-1]}
    text = "When were Karl and Emich Leiningen born?"
    question = dataclasses.replace(BORN, text=text, metadata=metadata)
    lookup = {"Karl": (karl,), "Emich Leiningen": (EMICH,)}
    _, fault, thoughts = planned(question, lookup)
    assert not fault
    assert said in thoughts
    assert 'Emich Leiningen says: "Emich was born on January 18, 1866."' in thoughts


def test_text_that_was_cut_off_counts_as_unread():
    hops = [GoldHop("Karl (prince)"), GoldHop("Emich Leiningen")]
    settings = {"normalize": "squad", "order": "any"}
    passages = (KARL, OTHER, EMICH)

    def shows(text, answer, thought=""):
        steps = [Step(1, thought, Answer(answer))]
        return is_shown(hops, passages, steps, text, **settings)

    both = f"{KARL.text} {EMICH.text}"
    assert shows(both, "18 January 1866")
    assert shows(both, "yes")
    assert not shows(both, "1912")
    assert not shows(KARL.text, "yes")
    # A relation that a thought states must be in the text that was shown.
    hops[0] = GoldHop("Karl (prince)", "father", "Emich")
    assert shows(both, "yes", "The father of Karl is Emich.")
    hops[0] = GoldHop("Karl (prince)", "father", "Otto")
    assert shows(both, "yes")
    assert not shows(both, "yes", "The father of Karl is Otto.")
    # A sentence that a thought repeats must be shown to its end.
    cut = both.removesuffix(" January 18, 1866.")
    assert not shows(cut, "yes", f'Emich Leiningen says: "{EMICH.text}"')
    assert shows(both, "yes", f'Emich Leiningen says: "{EMICH.text}"')
