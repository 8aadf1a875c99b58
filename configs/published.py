"""Released checkpoints of the six systems, evaluated as by their authors.

    python -m rsearch.evaluate --config=configs/published.py:search_r1_7b_ppo \\
        --workdir=runs/search_r1_7b_ppo --sets=nq,hotpotqa

The word after the colon is a key of CHECKPOINTS. The checkpoint's recipe sets the
protocol, the retriever and the public code's behaviour (`parity`); this file only sets
what differs in evaluation. --sets takes the names of config.sets, each with the index
that its questions need. docs/published.md has the table, the indexes and the remaining
differences.
"""

import json
import types
from typing import NamedTuple

from ml_collections import ConfigDict

from configs import (
    full_scale,
    r1_searcher,
    r_search,
    rag_r1,
    rearag,
    search_r1,
    variants,
)

GLM = rearag.BACKBONE  # its tokenizer is a file, with the same vocabulary
ABSTRACTS_INDEX = "indexes/hotpotqa_abstracts_bge_large"
SINGLE_HOP = ("nq", "triviaqa", "popqa")
MULTI_HOP = ("hotpotqa", "2wikimultihopqa", "musique")
SEVEN = (*SINGLE_HOP, *MULTI_HOP, "bamboogle")
FILES = {  # local copies of sets that are on no hub, under their publishers' names
    "r1_searcher_hotpotqa": "data/r1_searcher/hotpotqa_500.jsonl",
    "r1_searcher_2wikimultihopqa": "data/r1_searcher/2wiki_500.jsonl",
    "r1_searcher_musique": "data/r1_searcher/musique_500.jsonl",
    "ircot_hotpotqa": "data/ircot/hotpotqa/test_subsampled.jsonl",
    "ircot_2wikimultihopqa": "data/ircot/2wikimultihopqa/test_subsampled.jsonl",
    "ircot_musique": "data/ircot/musique/test_subsampled.jsonl",
}
# The public code's prompts, where a checkpoint's differs from the one in its paper.
RAG_R1_MQ_INSTRUCTION = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> "
    "first every time you get new information. After reasoning, if you find you lack "
    "some knowledge, you can call a search engine by <search> query_1,query_2 </search>"
    " and it will return the top searched results for each query between <information> "
    "and </information>. You can search as many times as you want, using up to three "
    "queries each time. If you find no further external knowledge needed, you can "
    "directly provide the answer inside <answer> and </answer>, without detailed "
    "illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
)
"""The words in training and evaluation; the paper has "as your want"."""
R1_SEARCHER_FORM = (
    "The output format of reasoning process and final answer are enclosed within "
    "<think> </think> and <answer> </answer> tags, respectively, i.e., "
    '"<think> reasoning process here </think>\n\n<answer> final answer here </answer>".'
    "\nDuring the thinking process, "
)
R1_SEARCHER_INSTRUCTION = (
    "The User asks a question, and the Assistant solves it.\nThe Assistant first "
    "thinks about the reasoning process in the mind and then provides the User with "
    f"the final answer.\n{R1_SEARCHER_FORM}the Assistant can perform searching for "
    "uncertain knowledge if necessary with the format of "
    '"<|begin_of_query|> search query (only keywords) here <|end_of_query|>". '
    "**A query must involve only a single triple**.\nThen, the system will provide the "
    'Assistant with helpful information with the format of "<|begin_of_documents|> '
    '...search results... <|end_of_documents|>".\n\nUser:{question}\nAssistant: '
)
"""Prompt of the base model's evaluation; in training it asks for keyword lists."""
R1_SEARCHER_SYSTEM = (
    "You are a helpful assistant.\nGiven a question, you should answer it by first "
    "thinking about the reasoning process in the mind and then providing the final "
    f"answer.\n{R1_SEARCHER_FORM}**you can perform searching for uncertain knowledge** "
    'if necessary with the format of "<|begin_of_query|> search query (only list '
    'keywords, such as **"keyword_1 keyword_2 ..."**)<|end_of_query|>". **A query must '
    "involve only a single triple**.\nThen, the search system will provide you with "
    'the retrieval information with the format of "<|begin_of_documents|> ...search '
    'results... <|end_of_documents|>".'
)
"""Prompt of the chat model's training; the local-index script has no chat prompt."""
R_SEARCH_SYSTEM = (
    "You are a helpful assistant that can solve the given question step by step. For "
    "each step, start by explaining your thought process. If additional information is "
    "needed, provide a specific query enclosed in <search> and </search>. The system "
    "will return the top search results within <observation> and </observation>. You "
    "can perform multiple searches as needed.\nWhen you know the final answer, use "
    "<original_evidence> and </original_evidence> to provide all potentially relevant "
    "original information from the observations. Ensure the information is complete "
    "and preserves the original wording without modification. If no searches were "
    "conducted or observations were made, you can skip the summary step. Finally, "
    "provide the final answer within <answer> and </answer> tags."
)
"""Prompt of evaluation; the one in training says to omit the evidence section."""
REARAG_SYSTEM = """\
Your task is to solve a question answering task. To improve your solving accuracy, \
please conduct reasoning process interleaving Thought, Action, Observation steps. \
Thought can reason about the current situation, and Action are in the form of \
function, there are two types:

# Available functions:
(1) search
{search}

(2) finish
{finish}

Please follow the format strictly.
"""
REARAG_FUNCTIONS = {  # name: (description, parameter, the parameter's description)
    "search": (
        "It can help you find useful information through the internet or local "
        "knowledge base. You can use this tool to access external knowledge",
        "query",
        "what you want to search",
    ),
    "finish": (
        "You can use this function to make a conclusion from the reasoning process "
        "and give the final answer. The reasoining process is completed after this "
        "`finish` function is called",
        "answer",
        "the final answer",
    ),
}


class Checkpoint(NamedTuple):
    """A released model.

    Attributes:
        source: the model's id on the hub.
        recipe: the module of its paper's recipe.
        words: the recipe's variant that the model was trained with.
        rows: number of rows to decode at a time; the weights and KV cache of a model
            of up to 9 B then fit on a device of 80 GB.
        tensor: number of devices that share a matrix product.
    """

    source: str
    recipe: types.ModuleType
    words: str
    rows: int
    tensor: int = 1


def _search_r1(name, words, *, tensor=1):
    source = f"PeterJinGo/SearchR1-nq_hotpotqa_train-{name}"
    return Checkpoint(source, search_r1, f"{words},parity", 64, tensor)


def _r1_searcher(name, words, *, rows):
    return Checkpoint(f"XXsongLALA/{name}", r1_searcher, f"{words},parity", rows)


def _rag_r1(name, words, *, rows):
    return Checkpoint(f"yaoyueduzhen/{name}", rag_r1, f"{words},parity", rows)


def _r_search(name, words):
    return Checkpoint(f"qingfei1/{name}", r_search, f"{words},parity", 16)


# Search-R1's first release has no version in its names; v0.3 was also rewarded for
# structure (`format`). The words 7b and 3b also serve for other models of about that
# size, since the recipe has no closer ones.
CHECKPOINTS = {
    "search_r1_7b_ppo": _search_r1("qwen2.5-7b-em-ppo", "7b,base,ppo"),
    "search_r1_7b_it_ppo": _search_r1("qwen2.5-7b-it-em-ppo", "7b,instruct,ppo"),
    "search_r1_3b_ppo": _search_r1("qwen2.5-3b-em-ppo", "3b,base,ppo"),
    "search_r1_3b_grpo": _search_r1("qwen2.5-3b-em-grpo", "3b,base,grpo"),
    "search_r1_3b_it_ppo": _search_r1("qwen2.5-3b-it-em-ppo", "3b,instruct,ppo"),
    "search_r1_3b_it_grpo": _search_r1("qwen2.5-3b-it-em-grpo", "3b,instruct,grpo"),
    "search_r1_llama_3b_ppo": _search_r1("llama3.2-3b-em-ppo", "3b,base,ppo"),
    "search_r1_llama_3b_grpo": _search_r1("llama3.2-3b-em-grpo", "3b,base,grpo"),
    "search_r1_llama_3b_it_ppo": _search_r1("llama3.2-3b-it-em-ppo", "3b,instruct,ppo"),
    "search_r1_llama_3b_it_grpo": _search_r1(
        "llama3.2-3b-it-em-grpo", "3b,instruct,grpo"
    ),
    "search_r1_7b_ppo_v0.2": _search_r1("qwen2.5-7b-em-ppo-v0.2", "7b,base,ppo"),
    "search_r1_7b_grpo_v0.2": _search_r1("qwen2.5-7b-em-grpo-v0.2", "7b,base,grpo"),
    "search_r1_7b_it_grpo_v0.2": _search_r1(
        "qwen2.5-7b-it-em-grpo-v0.2", "7b,instruct,grpo"
    ),
    "search_r1_3b_ppo_v0.2": _search_r1("qwen2.5-3b-em-ppo-v0.2", "3b,base,ppo"),
    "search_r1_3b_grpo_v0.2": _search_r1("qwen2.5-3b-em-grpo-v0.2", "3b,base,grpo"),
    "search_r1_3b_it_grpo_v0.2": _search_r1(
        "qwen2.5-3b-it-em-grpo-v0.2", "3b,instruct,grpo"
    ),
    "search_r1_14b_ppo_v0.2": _search_r1(
        "qwen2.5-14b-em-ppo-v0.2", "7b,base,ppo", tensor=4
    ),
    "search_r1_7b_ppo_v0.3": _search_r1("qwen2.5-7b-em-ppo-v0.3", "7b,ppo,format"),
    "search_r1_7b_grpo_v0.3": _search_r1("qwen2.5-7b-em-grpo-v0.3", "7b,grpo,format"),
    "search_r1_7b_it_grpo_v0.3": _search_r1(
        "qwen2.5-7b-it-em-grpo-v0.3", "7b,instruct,grpo,format"
    ),
    "search_r1_3b_ppo_v0.3": _search_r1("qwen2.5-3b-em-ppo-v0.3", "3b,ppo,format"),
    "search_r1_3b_grpo_v0.3": _search_r1("qwen2.5-3b-em-grpo-v0.3", "3b,grpo,format"),
    "search_r1_3b_it_ppo_v0.3": _search_r1(
        "qwen2.5-3b-it-em-ppo-v0.3", "3b,instruct,ppo,format"
    ),
    "search_r1_3b_it_grpo_v0.3": _search_r1(
        "qwen2.5-3b-it-em-grpo-v0.3", "3b,instruct,grpo,format"
    ),
    "search_r1_14b_ppo_v0.3": _search_r1(
        "qwen2.5-14b-em-ppo-v0.3", "7b,ppo,format", tensor=4
    ),
    "search_r1_14b_grpo_v0.3": _search_r1(
        "qwen2.5-14b-em-grpo-v0.3", "7b,grpo,format", tensor=4
    ),
    "search_r1_14b_it_grpo_v0.3": _search_r1(
        "qwen2.5-14b-it-em-grpo-v0.3", "7b,instruct,grpo,format", tensor=4
    ),
    "search_r1_32b_grpo_v0.3": _search_r1(
        "qwen2.5-32b-em-grpo-v0.3", "7b,grpo,format", tensor=4
    ),
    "r1_searcher_qwen": _r1_searcher("Qwen-2.5-7B-base-RAG-RL", "qwen,stage2", rows=16),
    "r1_searcher_llama": _r1_searcher(
        "Llama-3.1-8B-instruct-RAG-RL", "llama,stage2", rows=8
    ),
    "rag_r1_mq": _rag_r1("RAG-R1-mq-7b", "mq,stage2", rows=16),
    "rag_r1_sq": _rag_r1("RAG-R1-sq-7b", "sq,stage2", rows=32),
    "r_search_7b_grpo": _r_search("R-Search-7b-grpo", "7b,grpo"),
    "r_search_7b_ppo": _r_search("R-Search-7b-ppo", "7b,ppo"),
    "r_search_3b_grpo": _r_search("R-Search-3b-grpo", "3b,grpo"),
    "r_search_3b_ppo": _r_search("R-Search-3b-ppo", "3b,ppo"),
    # Without parity: the public code has since changed how it gets the final answer.
    "rearag_9b": Checkpoint("THU-KEG/ReaRAG-9B", rearag, "", 16, tensor=2),
}


def get_config(variant=""):
    """Return the configuration of the checkpoint `variant`, by default the first."""
    choices = {"checkpoint": tuple(CHECKPOINTS)}
    name = variants.parse_variant(variant, choices=choices).checkpoint
    checkpoint = CHECKPOINTS[name]
    c = checkpoint.recipe.get_config(checkpoint.words)
    c.name = name
    c.model.source = checkpoint.source
    c.rollout.max_concurrent = checkpoint.rows
    c.mesh.update(data=-1, fsdp=1, tensor=checkpoint.tensor)
    # Nothing is trained, but a check requires that the devices divide a micro-batch.
    c.rl.micro_batch = c.sft.micro_batch = 8
    EVALUATED_AS[checkpoint.recipe](c)
    return c


def as_search_r1(c):
    """Evaluate as Search-R1's evaluate.sh: greedy, same budgets as in training."""
    c.eval.max_questions = 0
    _sets(c, {name: {} for name in SEVEN})


def as_r1_searcher(c):
    """Evaluate as R1-Searcher's script: five passages, the base model's own prompt."""
    if c.protocol.name == "r1_searcher":
        c.protocol.instruction = R1_SEARCHER_INSTRUCTION
    else:
        c.protocol.system = R1_SEARCHER_SYSTEM
    c.retrieval.top_k = 5
    c.rollout.max_observation_tokens = 1536  # its longest five have 6,047 characters
    kilt = {"retrieval": {"index": full_scale.KILT_INDEX}}
    abstracts = {"retrieval": {"index": ABSTRACTS_INDEX}}
    sets = {
        name: abstracts if "hotpotqa" in name else kilt
        for name in (*MULTI_HOP, "bamboogle", *(f"r1_searcher_{n}" for n in MULTI_HOP))
    }
    _sets(c, sets)


def as_rag_r1(c):
    """Evaluate as RAG-R1's appendix A and scripts: sample, no turn after search 5."""
    if c.protocol.name == "rag_r1_mq":
        c.protocol.instruction = RAG_R1_MQ_INSTRUCTION
    c.rollout.update(max_searches=5, max_turn_tokens=1024, forced_final_turn=False)
    c.eval.update(temperature=0.7, max_questions=0)
    _sets(c, {name: {} for name in SEVEN})


def as_r_search(c):
    """Evaluate as R-Search's script.

    The script does not limit the number of searches; 8 are more than any rollout needs.
    HotpotQA, 2WikiMultiHopQA and MuSiQue each have a separate corpus, as in the paper.
    """
    c.protocol.system = R_SEARCH_SYSTEM
    c.retrieval.top_k = 5
    c.rollout.update(max_searches=8, max_turn_tokens=1024)
    c.eval.update(temperature=0.1, top_p=0.9)
    wiki18 = {"index": full_scale.WIKI18_INDEX, "max_passage_tokens": 256}
    sets = {name: {"retrieval": wiki18} for name in (*SINGLE_HOP, "bamboogle")}
    for name in MULTI_HOP:
        corpus = {"retrieval": {"index": f"indexes/{name}_e5_base"}}
        sets |= {name: corpus, f"ircot_{name}": corpus}
    _sets(c, sets)


def as_rearag(c):
    """Evaluate as ReaRAG's code: sample; GLM-4-9B writes observations and answers."""
    functions = {
        name: _schema(name, *function) for name, function in REARAG_FUNCTIONS.items()
    }
    c.protocol.system = REARAG_SYSTEM.format(**functions)
    c.tokenizer.source = GLM
    c.mesh.fsdp = 2
    with c.unlocked():
        del c.overrides.curate.mesh  # the teacher's, which is not called
    c.retrieval.reranker = ""
    for role in (c.models.writer, c.models.answerer):
        role.update(source=GLM, name="")
    c.eval.update(temperature=1.0, top_p=0.85, max_questions=100)
    c.eval.judge_prompt = "graded"
    _sets(c, {name: {} for name in ("musique", "hotpotqa", "nq")})


EVALUATED_AS = {
    search_r1: as_search_r1,
    r1_searcher: as_r1_searcher,
    rag_r1: as_rag_r1,
    r_search: as_r_search,
    rearag: as_rearag,
}


def _schema(name, description, parameter, meaning):
    """Return the JSON schema of a function with one parameter, as text."""
    parameters = {
        "type": "object",
        "properties": {parameter: {"description": meaning}},
        "required": [parameter],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return json.dumps(function, indent=4)


def _sets(c, sets):
    """Set config.sets to published sets of questions.

    Args:
        c: the configuration.
        sets: {name in rsearch/data/sets.py: overrides besides data.dev}. FILES has the
            copies of those that are on no hub.
    """
    set_overrides = {}
    for name, overrides in sets.items():
        file = f"={FILES[name]}" if name in FILES else ""
        set_overrides[name] = {"data": {"dev": f"set:{name}{file}"}} | overrides
    c.sets = ConfigDict(set_overrides).lock()
