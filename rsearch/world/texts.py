"""The prompts of the small models of the embedded world.

The published protocols' instructions are meant for large models. In the world, each
protocol's prompt is its name and the question; only the name tells protocols apart.
"""

from rsearch.protocols.r1_searcher import R1_SEARCHER, R1_SEARCHER_CHAT
from rsearch.protocols.r1_searcher_pp import R1_SEARCHER_PP
from rsearch.protocols.rag_r1 import RAG_R1_MQ, RAG_R1_SQ
from rsearch.protocols.rearag import REARAG
from rsearch.protocols.tagged import R_SEARCH, SEARCH_R1
from rsearch.types import Passage
from rsearch.world.facts import UNKNOWN
from rsearch.world.names import YEARS
from rsearch.world.plans import guessing, solution
from rsearch.world.world import World

INVALID = "Invalid. Try again."
DIRECT = "Answer: {question}"
RAG = "{passages} Answer: {question}"
REWRITE = "{document} Recall: {question}"
NUM_FRAMED = 50  # questions whose solutions a tokenizer sees in every protocol
EMPTY_PASSAGE = Passage("", "\n")

# The tokenizer, pretraining text and small models of the world depend on this list and
# its order, and on nothing else in protocols/table.py: adding a protocol there must not
# change any cached model or reported result. The tokenizer can also encode the words of
# other protocols, in more tokens.
WORLD_PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        SEARCH_R1,
        R_SEARCH,
        RAG_R1_SQ,
        RAG_R1_MQ,
        R1_SEARCHER,
        R1_SEARCHER_CHAT,
        R1_SEARCHER_PP,
        REARAG,
    )
}


def instruction(protocol: str) -> str:
    """Return the opening of a protocol's rollouts, such as "search_r1: {question}"."""
    return f"{protocol}: {{question}}"


def markup() -> list[str]:
    """Return the texts around the world's words, for a tokenizer to learn from.

    They open rollouts, frame retrieved passages, and follow malformed turns.
    """
    texts = [INVALID, DIRECT, RAG, REWRITE, UNKNOWN]
    texts += [f" {year} first." for year in YEARS]
    texts.append("Doc 1(Title: ) Doc 2(Title: ) Doc 3(Title: )\n")
    for name, protocol in WORLD_PROTOCOLS.items():
        frame = protocol.show_passages([""], [()])
        texts += [instruction(name), protocol.opening, protocol.invalid_message or ""]
        texts += [frame.before, frame.after]
        empty = protocol.show_passages(["a", "b"], [[EMPTY_PASSAGE], [EMPTY_PASSAGE]])
        texts.append(empty.before + empty.content + empty.after)
    return texts


def world_words(world: World) -> list[str]:
    """Return the texts of conversations about a world, for a tokenizer to learn from.

    These are all training questions with their solutions, some of them in every
    protocol's form, and the texts of `markup`. Nothing here depends on a recipe.
    """
    texts = 2 * markup()  # Twice, since only words that occur twice become tokens.
    for question in world.train:
        texts.append(f" {question.text}")
        for step in solution(world, question):
            texts.append(SEARCH_R1.write(step))
    for protocol in WORLD_PROTOCOLS.values():
        limit = protocol.max_queries
        for question in world.train[:NUM_FRAMED]:
            for recalls in (False, True):
                steps = solution(world, question, recalls=recalls, max_queries=limit)
                texts += map(protocol.write, steps)
        texts += [protocol.write(guessing("a"))] * 2
    return texts
