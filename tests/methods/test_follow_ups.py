"""Demonstrations of Self-Ask's steps: the prompts and replies that the method sees."""

from rsearch.methods.follow_ups import (
    ANSWER,
    FOLLOW_UP,
    READING,
    follow_ups,
    question_about,
)
from rsearch.methods.self_ask import self_ask
from rsearch.types import Question
from tests.methods.scripted import ScriptedModel, Searched, answer_one, shown

FILM = Question("q", "Where was the director of Solaris born?", ("Zavrazhye", "Z."))
FACTS = [
    ("Solaris", "director", "Andrei Tarkovsky Jr."),
    ("Andrei Tarkovsky Jr.", "place of birth", "Zavrazhye"),
]


def test_steps_and_readings_of_two_facts():
    rows = follow_ups(FILM, FACTS)
    first, second = map(question_about, FACTS)
    assert first == "What is the director of Solaris?"
    assert [(kind, d.method, d.question.id, *d.turns) for kind, d in rows] == [
        (FOLLOW_UP, "raw", "q", f" Yes.\nFollow up: {first}\nIntermediate answer:"),
        (READING, "rag", "q", "Andrei Tarkovsky Jr."),
        (FOLLOW_UP, "raw", "q", f"\nFollow up: {second}\nIntermediate answer:"),
        (READING, "rag", "q", "Zavrazhye"),
        (ANSWER, "raw", "q", "\nSo the final answer is: Zavrazhye"),
    ]
    assert [d.question.text for k, d in rows if k == READING] == [first, second]


def test_an_answer_is_one_line():
    question = Question("q", "Who?", ("Andrei\n Tarkovsky",))
    (*_, (_, last)) = follow_ups(question, FACTS)
    assert last.turns == ("\nSo the final answer is: Andrei Tarkovsky",)


def test_a_model_that_has_learnt_them_meets_the_same_prompts():
    rows = follow_ups(FILM, FACTS)
    steps = {d.messages[0]["content"]: d.turns[0] for _, d in rows if d.messages}
    readings = {d.question.text: d.turns[0] for kind, d in rows if kind == READING}

    def reply(request):
        if isinstance(request.prompt, str):
            # The stop string and what follows it are not part of a reply.
            return steps[request.prompt].removesuffix("Intermediate answer:")
        return next(v for query, v in readings.items() if query in shown(request))

    search = Searched()
    model = ScriptedModel(reply)
    rollout = answer_one(self_ask, model, text=FILM.text, search=search)
    assert rollout.answer == "Zavrazhye"
    raw = [r.prompt for r in model.requests if isinstance(r.prompt, str)]
    assert raw == list(steps)
