"""A reward term: the F1 of the answer, minus a cost for every search.

A term receives all rollouts of one question and returns a number for each. Arguments
after the `*` are its settings, which the configuration may set.
"""

from rsearch.text.normalize import f1


def f1_minus_searches(question, rollouts, *, cost=0.05):
    """Return the [G] rewards of a question's rollouts."""
    return [
        f1(rollout.answer, question.golden_answers, normalize="squad")
        - cost * len(rollout.searches)
        for rollout in rollouts
    ]
