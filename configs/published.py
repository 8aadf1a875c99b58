"""Released checkpoints of the six systems, asked as their authors ask them.

    python -m rsearch.evaluate --config=configs/published.py:search_r1_7b_ppo \\
        --workdir=runs/search_r1_7b_ppo --sets=nq,hotpotqa

The word after the colon is a key of CHECKPOINTS. Its recipe has the protocol, the
retriever and what its public code does (`parity`); only what evaluation does otherwise
stands here. --sets takes the names of config.sets, each with the index that its
questions need. docs/published.md has the table, the indexes and what is not followed.
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

GLM = rearag.BACKBONE  # has the tokenizer in a file, and the same vocabulary
ABSTRACTS_INDEX = "indexes/hotpotqa_abstracts_bge_large"
SINGLE_HOP = ("nq", "triviaqa", "popqa")
MULTI_HOP = ("hotpotqa", "2wikimultihopqa", "musique")
SEVEN = (*SINGLE_HOP, *MULTI_HOP, "bamboogle")
FILES = {  # copies of sets that are on no hub, as their publishers name them
    "r1_searcher_hotpotqa": "data/r1_searcher/hotpotqa_500.jsonl",
    "r1_searcher_2wikimultihopqa": "data/r1_searcher/2wiki_500.jsonl",
    "r1_searcher_musique": "data/r1_searcher/musique_500.jsonl",
    "ircot_hotpotqa": "data/ircot/hotpotqa/test_subsampled.jsonl",
    "ircot_2wikimultihopqa": "data/ircot/2wikimultihopqa/test_subsampled.jsonl",
    "ircot_musique": "data/ircot/musique/test_subsampled.jsonl",
}
# The public code's words, where a checkpoint reads others than its paper prints.
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
"""As in training and evaluation, where the paper has "as your want"."""
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
"""Of the base model's evaluation; training asks for lists of keywords."""
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
"""Of the chat model's training; the script for a local index has no chat prompt."""
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
"""Of evaluation; training says to omit the evidence section."""
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
REARAG_FUNCTIONS = {  # name: what it does, its parameter and what that is
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
        source: its id on the hub.
        recipe: the module of its paper's recipe.
        words: of the recipe, as it was trained.
        rows: decoded at once; with them the weights and keys and values of a model up
            to 9 B fit a device of 80 GB.
        tensor: devices that share a matrix product.
    """

    source: str
    recipe: types.ModuleType
    words: str
    rows: int
    tensor: int = 1


def _search_r1(name, words, *, rows=64, tensor=1):
    source = f"PeterJinGo/SearchR1-nq_hotpotqa_train-{name}"
    return Checkpoint(source, search_r1, f"{words},parity", rows, tensor)


def _r1_searcher(name, words, *, rows):
    return Checkpoint(f"XXsongLALA/{name}", r1_searcher, f"{words},parity", rows)


def _rag_r1(name, words, *, rows):
    return Checkpoint(f"yaoyueduzhen/{name}", rag_r1, f"{words},parity", rows)


def _r_search(name, words):
    return Checkpoint(f"qingfei1/{name}", r_search, f"{words},parity", 16)


# Search-R1's first release has no version in its names; v0.3 was rewarded for structure
# too (`format`). The recipe's 7b and 3b stand for other models of about their sizes.
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
    # Not parity: since then its public code has another final answer.
    "rearag_9b": Checkpoint("THU-KEG/ReaRAG-9B", rearag, "", 16, tensor=2),
}


def get_config(variant=""):
    """The checkpoint that `variant` names; the first without any."""
    choices = {"checkpoint": tuple(CHECKPOINTS)}
    name = variants.chosen(variant, choices=choices).checkpoint
    checkpoint = CHECKPOINTS[name]
    c = checkpoint.recipe.get_config(checkpoint.words)
    c.name = name
    c.model.source = checkpoint.source
    c.rollout.max_concurrent = checkpoint.rows
    c.mesh.update(data=-1, fsdp=1, tensor=checkpoint.tensor)
    # Nothing is trained, but the devices must divide the rows that would be.
    c.rl.micro_batch = c.sft.micro_batch = 8
    ASKED[checkpoint.recipe](c)
    return c


def as_search_r1(c):
    """As its evaluate.sh: greedy, with training's budgets, of all questions."""
    c.eval.max_questions = 0
    _sets(c, {name: {} for name in SEVEN})


def as_r1_searcher(c):
    """As its evaluation script: five passages, and other words for the base model."""
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
    """As appendix A and the evaluation scripts: sampled, and no turn after search 5."""
    if c.protocol.name == "rag_r1_mq":
        c.protocol.instruction = RAG_R1_MQ_INSTRUCTION
    c.rollout.update(max_searches=5, max_turn_tokens=1024, forced_final_turn=False)
    c.eval.update(temperature=0.7, max_questions=0)
    _sets(c, {name: {} for name in SEVEN})


def as_r_search(c):
    """As its evaluation script, which has no limit of searches: 8 are far beyond any.

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
    """As its public code: sampled; GLM-4-9B writes observations and final answers."""
    functions = {
        name: _schema(name, *function) for name, function in REARAG_FUNCTIONS.items()
    }
    c.protocol.system = REARAG_SYSTEM.format(**functions)
    c.tokenizer.source = GLM
    c.mesh.fsdp = 2
    with c.unlocked():
        del c.overrides.curate.mesh  # of the teacher, which is not asked
    c.retrieval.reranker = ""
    for role in (c.models.writer, c.models.answerer):
        role.update(source=GLM, name="")
    c.eval.update(temperature=1.0, top_p=0.85, max_questions=100)
    c.eval.judge_prompt = "graded"
    _sets(c, {name: {} for name in ("musique", "hotpotqa", "nq")})


ASKED = {
    search_r1: as_search_r1,
    r1_searcher: as_r1_searcher,
    rag_r1: as_rag_r1,
    r_search: as_r_search,
    rearag: as_rearag,
}


def _schema(name, does, parameter, meaning):
    """The JSON schema of a function with one parameter, as text."""
    parameters = {
        "type": "object",
        "properties": {parameter: {"description": meaning}},
        "required": [parameter],
    }
    function = {"name": name, "description": does, "parameters": parameters}
    return json.dumps(function, indent=4)


def _sets(c, sets):
    """Name published sets of questions, by {name: what else differs where it is asked}.

    Names are those of rsearch/data/sets.py; of those on no hub, FILES has the copies.
    """
    named = {}
    for name, overrides in sets.items():
        file = f"={FILES[name]}" if name in FILES else ""
        named[name] = {"data": {"dev": f"set:{name}{file}"}} | overrides
    with c.unlocked():
        c.sets = ConfigDict(named)
