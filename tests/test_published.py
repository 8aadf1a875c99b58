"""Released checkpoints are prompted as by their public inference code."""

import functools
import gzip
import json
import re

import pytest

from configs import published
from rsearch import evaluate
from rsearch.config.recipes import apply_overrides, load, run_command, validate
from rsearch.data.sets import SETS, find_set
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.spec import DecoderSpec
from rsearch.setup.checks import check_names
from rsearch.setup.load import load_setup
from rsearch.setup.policy import policy_protocol
from rsearch.types import Passage
from tests.models.reference import random_params
from tests.small_run import config, quick_compilation

__all__ = ["quick_compilation"]
SEARCH_R1 = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> "
    "first every time you get new information. After reasoning, if you find you lack "
    "some knowledge, you can call a search engine by {query} </search> and it will "
    "return the top searched results {each}between <information> and </information>. "
    "You can search as many times as {wish}. If you find no further external knowledge "
    "needed, you can directly provide the answer inside <answer> and </answer>, "
    "without detailed illustrations. For example, <answer> Beijing </answer>. "
    "Question: Who wrote it?\n"
)
ONE_QUERY = SEARCH_R1.format(query="<search> query", each="", wish="your want")
THINKING = (
    "The output format of reasoning process and final answer are enclosed within "
    "<think> </think> and <answer> </answer> tags, respectively, i.e., "
    '"<think> reasoning process here </think>\n\n<answer> final answer here </answer>".'
)
# {family: (messages for the question "Who wrote it", opening of the reply)}.
PROMPTS = {
    "search_r1": ([("user", ONE_QUERY)], ""),
    "rag_r1_sq": ([("user", ONE_QUERY)], ""),
    "rag_r1_mq": (
        [
            (
                "user",
                SEARCH_R1.format(
                    query="<search> query_1,query_2",
                    each="for each query ",
                    wish="you want, using up to three queries each time",
                ),
            )
        ],
        "",
    ),
    "r1_searcher_qwen": (
        [
            (
                "raw",
                "The User asks a question, and the Assistant solves it.\n"
                "The Assistant first thinks about the reasoning process in the mind "
                "and then provides the User with the final answer.\n"
                f"{THINKING}\n"
                "During the thinking process, the Assistant can perform searching for "
                "uncertain knowledge if necessary with the format of "
                '"<|begin_of_query|> search query (only keywords) here '
                '<|end_of_query|>". **A query must involve only a single triple**.\n'
                "Then, the system will provide the Assistant with helpful information "
                'with the format of "<|begin_of_documents|> ...search results... '
                '<|end_of_documents|>".\n\nUser:Who wrote it\nAssistant: ',
            )
        ],
        "<think>",
    ),
    "r1_searcher_llama": (
        [
            (
                "system",
                "You are a helpful assistant.\nGiven a question, you should answer it "
                "by first thinking about the reasoning process in the mind and then "
                f"providing the final answer.\n{THINKING}\nDuring the thinking "
                "process, **you can perform searching for uncertain knowledge** if "
                'necessary with the format of "<|begin_of_query|> search query (only '
                'list keywords, such as **"keyword_1 keyword_2 ..."**)<|end_of_query|>"'
                ". **A query must involve only a single triple**.\nThen, the search "
                "system will provide you with the retrieval information with the "
                'format of "<|begin_of_documents|> ...search results... '
                '<|end_of_documents|>".',
            ),
            ("user", "Who wrote it"),
        ],
        "<think>",
    ),
    "r_search": (
        [
            (
                "system",
                "You are a helpful assistant that can solve the given question step by "
                "step. For each step, start by explaining your thought process. If "
                "additional information is needed, provide a specific query enclosed "
                "in <search> and </search>. The system will return the top search "
                "results within <observation> and </observation>. You can perform "
                "multiple searches as needed.\nWhen you know the final answer, use "
                "<original_evidence> and </original_evidence> to provide all "
                "potentially relevant original information from the observations. "
                "Ensure the information is complete and preserves the original wording "
                "without modification. If no searches were conducted or observations "
                "were made, you can skip the summary step. Finally, provide the final "
                "answer within <answer> and </answer> tags.",
            ),
            ("user", "Who wrote it"),
        ],
        "",
    ),
    "rearag": (
        [
            (
                "system",
                """Your task is to solve a question answering task. To improve your \
solving accuracy, please conduct reasoning process interleaving Thought, Action, \
Observation steps. Thought can reason about the current situation, and Action are in \
the form of function, there are two types:

# Available functions:
(1) search
{
    "name": "search",
    "description": "It can help you find useful information through the internet or \
local knowledge base. You can use this tool to access external knowledge",
    "parameters": {
        "type": "object",
        "properties": {
            "query": {
                "description": "what you want to search"
            }
        },
        "required": [
            "query"
        ]
    }
}

(2) finish
{
    "name": "finish",
    "description": "You can use this function to make a conclusion from the reasoning \
process and give the final answer. The reasoining process is completed after this \
`finish` function is called",
    "parameters": {
        "type": "object",
        "properties": {
            "answer": {
                "description": "the final answer"
            }
        },
        "required": [
            "answer"
        ]
    }
}

Please follow the format strictly.
""",
            ),
            ("user", "Who wrote it"),
        ],
        "",
    ),
}
# For evaluation: passages, searches, tokens per turn, temperature and top-p.
LIMITS = {
    "search_r1": (3, 4, 500, 0.0, 1.0),
    "rag_r1": (3, 5, 1024, 0.7, 1.0),
    "r1_searcher": (5, 8, 512, 0.0, 1.0),
    "r_search": (5, 8, 1024, 0.1, 0.9),
    "rearag": (3, 14, 1024, 1.0, 0.85),
}
TINY = {
    "protocol.invalid_message": "Invalid.",
    "rollout.max_searches": 1,
    "rollout.max_turn_tokens": 6,
    "rollout.max_observation_tokens": 16,
    "rollout.max_concurrent": 2,
    "rollout.extend_chunk": 32,
    "model.dtype": "float32",
    "retrieval.corpus": "world",
    "retrieval.index": "",
    "retrieval.encoder": "hashed",
    "retrieval.top_k": 1,
    "eval.max_questions": 2,
    "eval.examples": 0,
    "mesh.fsdp": 1,
    "mesh.tensor": 1,
}


FAMILIES = [*PROMPTS]  # each is a prefix of its checkpoints' names


@functools.cache
def of(name):
    """Return the configuration of a checkpoint."""
    return load(f"configs/published.py:{name}")


def first(family):
    """Return the configuration of a family's first checkpoint."""
    return of(next(n for n in published.CHECKPOINTS if n.startswith(family)))


def test_checkpoints_are_evaluated_with_their_papers_limits():
    for name, checkpoint in published.CHECKPOINTS.items():
        c = of(name)
        assert (c.name, c.model.source) == (name, checkpoint.source)
        r = c.rollout
        limits = (c.retrieval.top_k, r.max_searches, r.max_turn_tokens)
        limits += (c.eval.temperature, c.eval.top_p)
        assert limits == next(LIMITS[key] for key in LIMITS if name.startswith(key))
        # On the devices that share one copy of the weights, and on eight.
        for num_devices in (c.mesh.fsdp * c.mesh.tensor, 8):
            validate(c, num_devices=num_devices)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_datasets_of_a_checkpoint_are_published_ones(family):
    c = first(family)
    check_names(c)
    for name, overrides in c.sets.items():
        other = apply_overrides(c, overrides.to_dict())
        validate(other)
        assert find_set(other.data.dev)[1] == SETS[name].size


def test_a_name_says_which_checkpoint_it_is():
    """By the backbone's size and kind (it: instruct), the algorithm and the release."""
    ids = {name: c.source for name, c in published.CHECKPOINTS.items()}
    assert len(set(ids.values())) == len(ids)
    for name, source in ids.items():
        for word in re.findall(r"\d+b|it|ppo|grpo|v0\.\d|llama|qwen|mq|sq", name):
            assert word in source.lower(), (name, source)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_those_of_the_public_code(family):
    messages, opening = PROMPTS[family]
    for name in published.CHECKPOINTS:
        if not name.startswith(family):
            continue
        protocol = policy_protocol(of(name))
        assert [
            (m["role"] if protocol.is_chat else "raw", m["content"])
            for m in protocol.messages("Who wrote it")
        ] == messages
        assert protocol.opening == opening


@pytest.mark.parametrize("name", ["hotpotqa", "bamboogle"])
def test_released_transcripts_keep_the_limits_and_show_passages_the_same_way(
    shared_data, name
):
    c = of("r1_searcher_qwen")
    protocol = policy_protocol(c)
    path = shared_data / "published" / f"r1_searcher_{name}_qwen.jsonl.gz"
    with gzip.open(path, "rt") as file:
        transcripts = [json.loads(line)["transcript"] for line in file]
    pattern = re.compile(
        r"\n\n<\|begin_of_documents\|>\n.*?<\|end_of_documents\|>\n\n", re.DOTALL
    )
    num_blocks = 0
    for transcript in transcripts:
        blocks = pattern.findall(transcript)
        assert len(blocks) <= c.rollout.max_searches
        num_blocks += len(blocks)
        for block in blocks:
            texts = re.split(r"^\(\d\)", block.split("<|")[1].split("|>\n")[1], flags=8)
            passages = [Passage("", text[:-1]) for text in texts[1:]]
            assert len(passages) == c.retrieval.top_k
            shown = protocol.show_passages(["q"], [passages])
            assert shown.before + shown.content + shown.after == block
    assert num_blocks > len(transcripts)


def layout(source, **more):
    """Write a tiny random model in the layout of a checkpoint's backbone."""
    setup = load_setup(config(), only_dev=True)
    shape = dict(width=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8)
    vocab = setup.tokenizer.vocab_size
    spec = DecoderSpec(
        vocab_size=vocab, mlp_width=24, max_context=32768, **shape, **more
    )
    huggingface.export(source, random_params(spec), spec, setup.tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, features",
    [
        ("search_r1_3b_ppo", {"qkv_bias": True, "tie_embeddings": True}),
        ("rag_r1_mq", {"qkv_bias": True}),
        ("r_search_7b_grpo", {"qkv_bias": True}),
        ("r1_searcher_qwen", {"qkv_bias": True}),
        ("r1_searcher_llama", {}),
        (
            "rearag_9b",
            {
                "qkv_bias": True,
                "rotary_dim": 4,
                "rotary_pairs": "neighbours",
                "fused_mlp": True,
            },
        ),
    ],
)
def test_a_tiny_model_of_the_same_layout_can_be_evaluated(name, features, tmp_path):
    layout(tmp_path / "model", **features)
    tiny = TINY | {"model.source": tmp_path / "model", "data.dev": "world:dev"}
    tiny |= {"tokenizer.source": tmp_path / "model"}
    tiny |= {"models.writer.source": "", "models.answerer.source": ""}
    command = [f"--config=configs/published.py:{name}", f"--workdir={tmp_path / 'run'}"]
    command += [f"--config.{field}={value}" for field, value in tiny.items()]
    assert run_command(evaluate.main, command) == 0
    (row,) = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (row["stage"], row["method"], row["n"]) == ("start", "protocol", 2)
