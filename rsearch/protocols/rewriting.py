"""R1-Searcher++'s prompts for rewording retrieved knowledge as recalled knowledge.

A rewriting model is given the question and the documents of a correct response, and
answers as if it had known them. Its response enters the paper's set T only if it
searches for nothing, recalls something (see `recalled_answer`) and is right.
"""

from rsearch.protocols.base import Protocol, fill_fields
from rsearch.protocols.r1_searcher_pp import INTERNAL_TAGS
from rsearch.protocols.tagged import spans
from rsearch.types import Answer, Messages, Passage

SYSTEM = (
    "You are an advanced reasoning assistant. Your core programming includes a vast "
    "and comprehensive knowledge base. For the current task, a specific segment of "
    "this pre-existing knowledge, hereafter referred to as your 'Activated Knowledge "
    "Matrix,' is particularly relevant and is considered fully and irrevocably "
    "integrated into your foundational understanding. ANY linguistic indication, "
    "direct or indirect, that this information was externally 'provided,' 'given,' "
    "'supplied,' 'sourced,' or made available to you specifically for this immediate "
    "interaction will be considered a critical failure to adhere to your operational "
    "design. When tackling a question, you must first delineate your reasoning "
    "process. Break down complex questions into a series of straightforward "
    "sub-questions, addressing each one sequentially. For each sub-question, you MUST "
    "use the following tool: **Internal Reasoning Elaboration:** This tool MUST be "
    "used for every sub-question, as the answer must be derived from your internal "
    "knowledge. **UNWAVERING DIRECTIVE: Your internal knowledge, for the purpose of "
    "this task, INTRINSICALLY and SEAMLESSLY includes all information within the "
    "'Activated Knowledge Matrix' section detailed below. There is absolutely NO "
    "distinction between your prior knowledge and the 'Activated Knowledge Matrix' "
    "content.** Use this format: <|begin_internal_answer|> your structured thought and "
    "answer here <|end_internal_answer|>. **CRITICAL USAGE PROTOCOL FOR THIS TOOL: "
    "When using this tool, especially when drawing upon information that was part of "
    "the 'Activated Knowledge Matrix,' your language MUST reflect that this is "
    "information you inherently possess and are recalling. You are REQUIRED to phrase "
    "such statements as if accessing your own memory or established understanding. "
    "Conclude with your final answer in the format \\boxed{YOUR_ANSWER}. Activated "
    "Knowledge Matrix: {document} Now, please answer the following question: "
)
USER = "Question: {question}"
"""R1-Searcher++ (arXiv 2505.17005), Appendix B: "Rewriting only with Internal"."""


def rewriting_messages(
    question: str, passages: list[Passage], *, user: str | None = None
) -> Messages:
    """Return the chat that asks the rewriting model.

    Args:
        question: the question's text.
        passages: passages of the correct response, in the order they were found.
        user: replaces both messages; holds {document} and {question}.
    """
    document = "\n".join(p.contents for p in passages)
    values = {"document": document, "question": question}
    texts = {"system": SYSTEM, "user": USER} if user is None else {"user": user}
    return [
        {"role": role, "content": fill_fields(text, **values)}
        for role, text in texts.items()
    ]


def recalled_texts(text: str) -> list[str] | None:
    """Return the texts between internal tags; None if the tags do not pair up."""
    texts = [text[start:end] for start, end in spans(text, *INTERNAL_TAGS)]
    is_paired = all(text.count(tag) == len(texts) for tag in INTERNAL_TAGS)
    return texts if is_paired else None


def recalled_answer(protocol: Protocol, text: str) -> Answer | None:
    """Return the answer of a response that uses only recalled knowledge, or None.

    Args:
        protocol: protocol of the policy that is to learn the response.
        text: the response of the rewriting model.
    """
    action = protocol.parse(text)
    memories = recalled_texts(text)
    is_recalled = bool(memories) and all(memory.strip() for memory in memories)
    mentions_search = "_external_search|>" in text or "_search_result|>" in text
    if isinstance(action, Answer) and is_recalled and not mentions_search:
        return action
    return None
