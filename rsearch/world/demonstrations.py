"""Write imperfect demonstrations of the embedded world's questions."""

import numpy as np

from rsearch.data.demonstrations import DIRECT, RAG, Demonstration
from rsearch.protocols.base import Protocol
from rsearch.world.plans import early_stop, guess, solution
from rsearch.world.world import World


def world_demonstrations(
    world: World,
    protocol: Protocol,
    *,
    seed: int,
    repeats: int,
    flawed_share: float,
    guess_share: float,
    baseline_share: float,
    recall_share: float = 0.0,
) -> list[Demonstration]:
    """Return imperfect demonstrations of the world's training questions.

    Args:
        protocol: protocol in which the demonstrations are written. If it allows several
            queries in a turn, facts that do not depend on each other are searched for
            together.
        seed: seed of the flaws.
        repeats: demonstrations per question, each with its own flaw or none.
        flawed_share: share of the demonstrations that do not reach the answer.
        guess_share: share of the flawed ones that guess immediately; the others stop
            before the last search, and answer with what they have read by then.
        baseline_share: number of demonstrations that answer as the baselines do,
            relative to the others, so that the model also sees the baselines' prompts.
        recall_share: share of the flawless ones about famous entities that recall what
            is known instead of searching for it.
    """
    flaw_rng = np.random.default_rng([seed, 2])
    recall_rng = np.random.default_rng([seed, 4])
    demonstrations = []
    for question in world.train:
        for _ in range(repeats):
            flaw_draw, guess_draw, baseline_draw = flaw_rng.random(3)
            guess_steps = guess(world, question, flaw_rng)
            if flaw_draw >= flawed_share:
                steps = solution(
                    world,
                    question,
                    recalls=recall_rng.random() < recall_share,
                    max_queries=protocol.max_queries,
                )
            elif guess_draw < guess_share:
                steps = guess_steps
            else:
                steps = early_stop(world, question, recall_rng)
            turns = tuple(map(protocol.write, steps))
            demonstrations.append(Demonstration(question, turns))
            if baseline_draw < baseline_share:
                method = DIRECT if guess_draw < 0.5 else RAG
                answer = f" {question.golden_answers[0]}"
                demonstrations.append(Demonstration(question, (answer,), method))
    return demonstrations
