"""Let a model ask itself: Self-Ask (Press et al., arXiv 2210.03350)."""

import dataclasses
import re
from collections.abc import Sequence

from rsearch.llm.requests import Generate, Search
from rsearch.methods.base import AT_LIMIT, Kit, ask_chats, few_shot, text_of
from rsearch.methods.reading import rag_messages
from rsearch.types import Question

INTERMEDIATE, FINAL = "\nIntermediate answer:", "\nSo the final answer is:"
STOP = ("Intermediate answer:", "\nQuestion:")
STEP = re.compile(
    r"follow up:[ \t]*(?P<query>\S.*)|so the final answer is:(?P<answer>.*)",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Chain:
    """A question, and the steps towards its answer.

    Attributes:
        prompt: the raw text so far, which the model continues.
        steps: steps, each a follow-up and its intermediate answer. The last one may be
            the final answer, or text that leads no further.
        goes_on: whether another step may follow.
    """

    prompt: str
    steps: tuple[str, ...] = ()
    answer: str | None = None
    goes_on: bool = True


def self_ask(
    question: Question,
    kit: Kit,
    *,
    rounds: int = 5,
    forces_answer: bool = True,
    top_k: int = 0,
):
    """Search with the follow-up questions that the model asks before it answers.

    The raw-text prompt has 4 examples of ours; the paper also has 4. `rag`'s reader
    answers a follow-up from its passages, and its answer is put where the model expects
    one; if there is none, the model continues by itself. If a reply has several
    follow-ups, the first counts. FlashRAG's port is Ret-Robust's, which begins with
    passages for the question.

    Args:
        rounds: number of follow-ups, at most.
        forces_answer: whether a model that ends without an answer is made to give one,
            as in the authors' code; otherwise there is none.
        top_k: number of passages to read from each search; 0 reads all.
    """
    chain = first_chain(question.text)
    while chain.goes_on:
        (chain,) = yield from extend([chain], kit, max_steps=rounds + 1, top_k=top_k)
    if ends_at_limit(chain):
        yield AT_LIMIT
    if chain.answer is not None or not forces_answer:
        return chain.answer
    completion = yield Generate(chain.prompt + FINAL, kit.answer_tokens, ("\n",))
    return _strip_answer(text_of(completion)) or None


def first_chain(question: str) -> Chain:
    """Return a chain without steps, which follows the worked examples."""
    opening = f"Question: {question}\nAre follow up questions needed here:"
    return Chain(f"{few_shot('self_ask')}\n\n{opening}")


def ends_at_limit(chain: Chain) -> bool:
    """Return whether a chain that has ended asks for one more search."""
    last_step = STEP.match(chain.steps[-1])
    return last_step is not None and bool(last_step["query"])


def extend(chains: Sequence[Chain], kit: Kit, *, max_steps: int, top_k: int):
    """Sample the next step of each chain that goes on; return all chains.

    Args:
        chains: chains of one question; equal ones get different samples.
        max_steps: number of steps of a chain; the last one is not searched.
        top_k: number of passages to read from each search; 0 reads all.
    """
    running_indices = [i for i, chain in enumerate(chains) if chain.goes_on]
    if not running_indices:
        return list(chains)
    completions = yield [
        Generate(chains[i].prompt, kit.thought_tokens, STOP) for i in running_indices
    ]
    extended_chains = yield from take_steps(
        [chains[i] for i in running_indices],
        [text_of(completion) for completion in completions],
        kit,
        max_steps=max_steps,
        top_k=top_k,
    )
    chain_by_index = dict(zip(running_indices, extended_chains, strict=True))
    return [chain_by_index.get(i, chain) for i, chain in enumerate(chains)]


def take_steps(
    chains: Sequence[Chain],
    texts: Sequence[str],
    kit: Kit,
    *,
    max_steps: int,
    top_k: int,
):
    """Answer the follow-up in each text; return the chains with these steps added.

    Args:
        chains: chains that go on.
        texts: texts that continue their prompts, each with one step.
        kit, max_steps, top_k: see `extend`.
    """
    steps = [STEP.search(text) for text in texts]
    asking_indices = [
        i
        for i, (chain, step) in enumerate(zip(chains, steps, strict=True))
        if step is not None and step["query"] and len(chain.steps) + 1 < max_steps
    ]
    queries = [steps[i]["query"].strip() for i in asking_indices]
    answers = {}
    if asking_indices:
        results = yield [Search((query,), top_k or None) for query in queries]
        chats = [
            rag_messages(kit, query, passages)
            for query, (passages,) in zip(queries, results, strict=True)
        ]
        replies = yield from ask_chats(chats, kit.answer_tokens)
        answers = dict(zip(asking_indices, replies, strict=True))
    extended_chains = []
    for i, (chain, text, step) in enumerate(zip(chains, texts, steps, strict=True)):
        # Text before the step is not part of it; without a step, the whole text is.
        start = 0 if step is None else step.start()
        goes_on, final_answer = i in answers, None
        if goes_on:
            text = text[: step.end()] + INTERMEDIATE
            if answer := answers[i]:
                text += f" {' '.join(answer.split()).removesuffix('.')}."
        elif step is not None and step["answer"] is not None:
            text, final_answer = text[: step.end()], _strip_answer(step["answer"])
        else:
            text = text.rstrip()
        chain_steps = (*chain.steps, text[start:].strip())
        extended_chains.append(
            Chain(chain.prompt + text, chain_steps, final_answer, goes_on)
        )
    return extended_chains


def _strip_answer(answer: str) -> str:
    return answer.strip().removesuffix(".")
