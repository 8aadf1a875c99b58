"""The words that small models of the embedded world are asked in.

Instructions of published protocols are for large models. In the world each protocol is
opened by its own name and the question, which is all that tells the protocols apart.
"""

from rsearch.protocols.table import PROTOCOLS
from rsearch.types import Passage
from rsearch.world.facts import UNKNOWN
from rsearch.world.names import YEARS
from rsearch.world.plans import guessing, solution

INVALID = "Invalid. Try again."
DIRECT = "Answer: {question}"
RAG = "{passages} Answer: {question}"
REWRITE = "{document} Recall: {question}"
FRAMED = 50  # questions whose solutions a tokenizer sees in every protocol
NOTHING = Passage("", "\n")


def instruction(protocol: str) -> str:
    """What opens a rollout of the protocol of this name: "search_r1: {question}"."""
    return f"{protocol}: {{question}}"


def markup() -> list[str]:
    """What is written around the world's own words, for a tokenizer to learn from.

    That is what opens rollouts, frames what is found, and answers malformed turns.
    """
    texts = [INVALID, DIRECT, RAG, REWRITE, UNKNOWN]
    texts += [f" {year} first." for year in YEARS]
    texts.append("Doc 1(Title: ) Doc 2(Title: ) Doc 3(Title: )\n")
    for name, protocol in PROTOCOLS.items():
        frame = protocol.observe([""], [()])
        texts += [instruction(name), protocol.opening, protocol.invalid_message or ""]
        texts += [frame.before, frame.after]
        found = protocol.observe(["a", "b"], [[NOTHING], [NOTHING]])
        texts.append(found.before + found.content + found.after)
    return texts


def world_words(world) -> list[str]:
    """All that is said in conversations about a world, for a tokenizer to learn from.

    The words of every training question's solution, some of them in each protocol's
    frame, and all that `markup` has. Nothing of it depends on a recipe.
    """
    texts = 2 * markup()  # Twice, as a word must occur twice to be worth a token.
    for question in world.train:
        texts.append(f" {question.text}")
        for step in solution(world, question):
            texts.append(PROTOCOLS["search_r1"].write(step))
    for protocol in PROTOCOLS.values():
        for question in world.train[:FRAMED]:
            for recalls in (False, True):
                texts += map(
                    protocol.write,
                    solution(
                        world,
                        question,
                        recalls=recalls,
                        max_queries=protocol.max_queries,
                    ),
                )
        texts += [protocol.write(guessing("a"))] * 2
    return texts
