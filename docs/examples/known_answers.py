"""A data stage's method: demonstrations that answer without a search.

A method receives the stage (its questions, model, search and protocol). It returns a
decision for each question, and the demonstrations or questions that the stage writes.
"""

from rsearch.data.demonstrations import Demonstration
from rsearch.protocols.base import Step
from rsearch.stages.curate.summary import Decision, Selection
from rsearch.types import Answer


def known_answers(stage):
    """Return a demonstration of the golden answer of every question."""
    decisions, demonstrations = [], []
    for question in stage.questions:
        step = Step(1, "I know this.", Answer(question.golden_answers[0]))
        turns = (stage.protocol.write(step),)
        demonstrations.append(("known", Demonstration(question, turns)))
        decisions.append(Decision("known", is_kept=True, num_rollouts=0))
    return Selection(decisions, demonstrations)
