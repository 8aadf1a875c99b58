"""Self-RAG: a model that decides whether to search, and grades what it reads."""

import numpy as np
import pytest

from rsearch.llm.requests import Score, TextWithMarkers
from rsearch.methods.self_rag import answer_score, self_rag, text_before
from rsearch.methods.table import demanded_inputs
from rsearch.protocols.self_rag import GRADES, TOKENS, answer_text
from rsearch.types import Outcome
from tests.methods.scripted import ScriptedModel, Searched, answer_one, completion, kit

PROMPT = "### Instruction:\nWho is X?\n\n### Response:\n"
# Probabilities of the grades: relevance, support, utility from 1 to 5.
PROBS = [(0.9, 0.1), (0.6, 0.3, 0.1), (0.05, 0.05, 0.1, 0.3, 0.5)]
RIGHT = "[Relevant]Rome.[Fully supported][Utility:5]"


def grading(*answers, search=0.5, probs=PROBS):
    """Return a model that answers after the i-th passage, or without a passage.

    Args:
        answers: (text, mean log-probability) after each passage; the first is also the
            answer without a passage.
        search: probability of [Retrieval]; [No Retrieval] has the rest.
        probs: probabilities of the tokens of each grade.
    """
    by_token = {"[Retrieval]": search, "[No Retrieval]": 1 - search}
    for grade, values in zip(GRADES, probs, strict=True):
        by_token |= dict(zip(grade, values, strict=True))

    def number(texts):
        return int(texts[2].split("\n")[0].rsplit(" ", 1)[1]) if texts[2:] else 1

    def reply(request):
        texts = () if isinstance(request.prompt, str) else request.prompt.texts
        text, logp = answers[number(texts) - 1]
        return completion(text, tokens=("a", "b"), logp=[logp - 0.1, logp + 0.1])

    def score(request):
        # Each of two tokens has half of the log-probability: the sum is the text's.
        return "ab", np.full(2, np.log(by_token[request.text]) / 2)

    return ScriptedModel(reply, score=score)


@pytest.mark.parametrize(
    ("w_use", "score"), [(1.0, 2.8315), (0.5, 2.5440)], ids=["scripts", "function"]
)
def test_the_score_follows_the_published_formula(w_use, score):
    logps = [np.log(p) - 7 for p in PROBS]  # the common factor cancels
    assert answer_score([-0.5], logps, (1, 1, w_use)) == pytest.approx(score, abs=1e-4)
    for i, term in enumerate((0.9, 0.75, 0.575 * w_use)):
        fewer = [None if j == i else values for j, values in enumerate(logps)]
        rest = answer_score([-0.5], fewer, (1, 1, w_use))
        assert rest == pytest.approx(score - term, abs=1e-4)
    assert answer_score([], [None] * 3, (1, 1, w_use)) == 0


@pytest.mark.parametrize(
    ("probability", "threshold", "searches"),
    [
        # The authors' code divides logarithms: it would search only in the first case.
        (0.05, 0.2, False),
        (0.9, 0.2, True),
        (0.19, 0.2, False),
        (0.21, 0.2, True),
        (1 - 1e-9, 1, False),
        (1e-9, -1, True),
    ],
)
def test_it_searches_if_retrieval_is_probable_enough(probability, threshold, searches):
    model, search = grading((RIGHT, -0.5), search=probability), Searched(1)
    rollout = answer_one(self_rag, model, search=search, threshold=threshold)
    assert search.queries == ["Who is X?"] * searches and rollout.answer == "Rome."
    probes, asked = model.requests[:2], model.requests[2]
    assert [(p.prefix, p.text, p.is_mark) for p in probes] == [
        (TextWithMarkers((PROMPT, "")), "[Retrieval]", True),
        (TextWithMarkers((PROMPT, "")), "[No Retrieval]", True),
    ]
    behind = "[Retrieval]<paragraph>", "Who is X? 1\ntext 1", "</paragraph>"
    texts = (PROMPT, *(behind if searches else ["[No Retrieval]"]))
    assert asked.prompt.texts == texts and asked.max_tokens == 100


def test_without_passages_it_answers_as_without_a_search():
    asked = []
    for search, probability in ((Searched(0), 0.9), (Searched(3), 0.1)):
        model = grading((RIGHT, -0.5), search=probability)
        rollout = answer_one(self_rag, model, search=search)
        asked.append((model.requests, rollout.answer))
    assert asked[0] == asked[1]


def test_each_grade_is_scored_after_the_text_before_it():
    model = grading((RIGHT, -0.5))
    used = kit(shorten=lambda text: text.split("\n")[0])
    answer_one(self_rag, model, search=Searched(1), used=used)
    scores = [r for r in model.requests[3:] if isinstance(r, Score)]
    assert [s.text for s in scores] == [t for grade in GRADES for t in grade]
    assert all(s.is_mark and s.prefix.texts[2] == "Who is X? 1" for s in scores)
    written = [s.prefix.texts[3] for s in scores]
    expected = ["", "[Relevant]Rome.", "[Relevant]Rome.[Fully supported]"]
    sizes = [2, 3, 5]
    assert written == [
        f"</paragraph>{text}" for text, n in zip(expected, sizes) for _ in range(n)
    ]


@pytest.mark.parametrize(
    ("answers", "settings", "best"),
    [
        # Only the likelihood differs; the first of equal ones wins.
        ([("a", -2), ("b", -0.5), ("c", -1)], {}, "b"),
        ([("a", -1), ("b", -1), ("c", -1)], {}, "a"),
        # Support counts .75 and utility .575, against exp(-.1) - exp(-1) = .54.
        ([("a", -0.1), ("b[Fully supported]", -1), ("c", -3)], {}, "b"),
        ([("a", -0.1), ("b[Utility:1]", -1), ("c", -3)], {}, "b"),
        ([("a", -0.1), ("b[Utility:1]", -1), ("c", -3)], {"w_use": 0.5}, "a"),
        ([("a", -0.1), ("b[Fully supported]", -1), ("c", -3)], {"w_sup": 0.0}, "a"),
    ],
)
def test_the_answer_of_the_highest_score_wins(answers, settings, best):
    rollout = answer_one(self_rag, grading(*answers), **settings)
    assert (rollout.answer, rollout.outcome) == (best, Outcome.ANSWERED)


def test_reflection_tokens_are_no_part_of_an_answer():
    text = "[Relevant]Rome.[Partially supported][Continue to Use Evidence]It is."
    assert answer_text(f"{text}[Utility:3]") == "Rome. It is."
    assert answer_text("[Irrelevant][Utility:1]\n") is None
    assert text_before(RIGHT, GRADES[2]) == "[Relevant]Rome.[Fully supported]"
    assert text_before("[Relevant]Rome.", GRADES[1]) is None


@pytest.mark.parametrize("missing", TOKENS)
def test_a_tokenizer_without_reflection_tokens_is_refused(missing):
    assert demanded_inputs(["self_rag:threshold=0.1"], TOKENS) == {}
    with pytest.raises(ValueError, match="self_rag") as refused:
        demanded_inputs(["self_rag"], [t for t in TOKENS if t != missing])
    assert repr(missing) in str(refused.value)


def test_a_model_that_spells_the_tokens_reads_them_as_text():
    model = grading((RIGHT, -0.5))
    rollout = answer_one(self_rag, model, search=Searched(1), spelled=True)
    front = f"{PROMPT}[Retrieval]<paragraph>Who is X? 1\ntext 1</paragraph>"
    *probes, asked = model.requests[:3]
    scores = model.requests[3:]
    assert rollout.answer == "Rome." and asked.prompt == front
    assert [p.prefix for p in probes] == [TextWithMarkers((PROMPT, "", ""))] * 2
    assert scores[-1].prefix == TextWithMarkers(
        (front, "", RIGHT.partition("[Utility")[0])
    )
    assert not any(s.is_mark for s in [*probes, *scores])
    assert demanded_inputs(["self_rag:spelled=true"]) == {}
