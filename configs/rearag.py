"""ReaRAG: imitate a reasoning model's chains of Thought, Action and Observation.

    python -m rsearch.train --config=configs/rearag.py --dry_run
    python -m rsearch.train --config=configs/rearag.py:tiny --workdir=runs/rearag

Words after the colon: `no_reasoning` makes the chains from golden decompositions with
the policy's own model (Algorithm 3, the paper's ablation); `parity` follows the public
code; `tiny` runs on the embedded world, where `no_reasoning` is refused.
Source: arXiv 2503.21729.

The models that write observations and word final answers are called at an endpoint. The
paper's embedding model and reranker are not public; this recipe uses its code's
retriever and a public cross-encoder instead:

    python -m rsearch.index --corpus=wiki-18.jsonl --family=e5 \\
        --encoder=intfloat/e5-base-v2 --out=indexes/wiki18_100w_e5_base \\
        --max_passage_tokens=256 --max_query_tokens=256
"""

from ml_collections import ConfigDict

from configs import base, full_scale, tiny_world, variants

FLAGS = ("no_reasoning", "parity", "tiny")
BACKBONE = "zai-org/glm-4-9b-chat-hf"
TEACHER = "Qwen/QwQ-32B-Preview"
RERANKER = "cross-encoder/ms-marco-MiniLM-L-6-v2"
ENGINE = "GLM-4-32B"  # writes observations, and the final answer
CHAINS_SYSTEM = """\
Your task is to solve a question answering task. To improve your solving accuracy, \
please conduct reasoning processes following this sequence: Thought, Action, \
Observation steps. Thought can reason about the current situation, and Action is in \
the form of a function. There are two available function types:

Available Functions:
(1) Search
{
    "name": "search",
    "description": "It can help you find useful information through the internet or \
local knowledge base. You can use this tool to access external knowledge.",
    "parameters": {
        "type": "object",
        "properties": {
            "query": {
                "description": "what you want to search"
            }
        },
        "required": ["query"]
    }
}

(2) Finish
{
    "name": "finish",
    "description": "You can use this function to make a conclusion from the reasoning \
process and give the final answer. The reasoning process is completed after this \
`finish` function is called",
    "parameters": {
        "type": "object",
        "properties": {
            "answer": {
                "description": "the final answer"
            }
        },
        "required": ["answer"]
    }
}

Some important rules you must follow:
(1) Please follow the function calling format above strictly.
(2) A set of `Thought`, `Action`, and `Observation` is considered as one reasoning \
step. Add numbering after each `Thought`, `Action`, and `Observation` to indicate the \
sequence of the reasoning steps.
(3) Please give your `Thought` first, then the `Action`, and finally the \
`Observation`, follow the format as shown in the in-context examples below.
(4) In your `Thought`, you should perform reflection when necessary to ensure the \
correctness of your reasoning process, such as: "Wait! Maybe I made some mistakes! I \
need to rethink from scratch", "Alternatively, we can...", "Hold on, let's try \
another approach", etc.
(5) Give your `Action` in the form of function call, as shown in in-context examples \
below.
(6) You should not provide information based on your own knowledge, only use the \
information provided in the context.

Some example of reflection text:
"There is no enough information from the previous steps. I need to plan my query \
again."
"No context found from observation. Let me restart the reasoning process."
"Missing information. Let me restructure my query."
"Wait! Maybe I made some mistakes! I need to rethink from scratch."
"I think I need to take a step back and reconsider my approach."
"I need to reevaluate my reasoning process. Let's start over."
"I need to reflect on my reasoning. Let's try a different approach."
"""
"""P_d of Appendix B, for making chains; they are learnt under the protocol's own P.

The paper prints only these reflection texts, and omits the in-context examples that
rules 3 and 5 mention: CHAINS_EXAMPLE replaces them.
"""

CHAINS_EXAMPLE = """
In-context example:
Question: Which river flows through the birthplace of the director of The Third Man?

Reasoning process with function call:
Thought 1: First I need to know who directed The Third Man.
Action 1:
```
{"function": "search", "parameters": {"query": "director of The Third Man"}}
```
Observation 1: The Third Man was directed by Carol Reed.
Thought 2: Now I need the birthplace of Carol Reed.
Action 2:
```
{"function": "search", "parameters": {"query": "Carol Reed birthplace"}}
```
Observation 2: No context found.
Thought 3: Missing information. Let me restructure my query.
Action 3:
```
{"function": "search", "parameters": {"query": "Where was Carol Reed born?"}}
```
Observation 3: Carol Reed was born in Putney, London.
Thought 4: Putney lies on the Thames, but I should only use what the context says.
Action 4:
```
{"function": "search", "parameters": {"query": "river that flows through London"}}
```
Observation 4: The River Thames flows through London.
Thought 5: The river is the Thames.
Action 5:
```
{"function": "finish", "parameters": {"answer": "Thames"}}
```
"""
"""Written for this recipe, in the protocol's own format, with one reflection."""


def get_config(variant=""):
    """Return the recipe's configuration; the module's docstring lists the variants."""
    # No model of the embedded world can follow the ablation's prompt.
    words = variants.parse_variant(
        variant, flags=FLAGS, clashes=(("no_reasoning", "tiny"),)
    )
    c = base.get_config()
    c.name = "_".join(["rearag", *variant.split(",")]) if variant else "rearag"
    c.stages = ("curate", "sft")
    method(c, words)
    (tiny if words.tiny else at_full_scale)(c, words)
    if words.parity:
        parity(c, words)
    return c


def method(c, words):
    """Set what is the same at any size: the paper's Algorithms 1 and 2."""
    c.protocol.name = "rearag"
    chains = {
        "method": "no_reasoning" if words.no_reasoning else "chains",
        "measure": "f1",  # chains with an F1 of 0 are discarded
        "observations": "gold",
        "max_steps": 25,
        "max_retries": 20,
    }
    c.overrides = ConfigDict({"curate": {"curate": chains}}).lock()
    c.sft.demonstrations = "stage:curate"
    c.eval.answer_from = "finish"
    c.retrieval.writer_prompt = "unless_comparison"
    c.rollout.max_searches = 14  # with the last step, fifteen steps


def at_full_scale(c, words):
    """Set the sizes of section 4.2 and, if it has none, of the public code."""
    full_scale.backbone(c, BACKBONE)
    full_scale.wiki18_with_e5(c, top_k=3)
    c.retrieval.update(reranker=RERANKER, rerank_from=10)
    full_scale.eight_devices(c, tensor=2)
    full_scale.sparse_checkpoints(c, rl_steps=10)
    c.optim.update(b1=0.9, b2=0.95, weight_decay=0.1)
    # Training questions of MuSiQue, HotpotQA and NQ with their gold passages; for NQ
    # these are in DPR's files.
    c.data.train = "data/musique_hotpotqa_nq_train.jsonl"
    c.data.dev = full_scale.questions("hotpotqa", "dev")
    c.rollout.update(
        group_size=1,
        max_prompt_tokens=1024,
        max_turn_tokens=1024,
        max_observation_tokens=256,
        max_written_tokens=1024,  # the writer's whole reply
        max_concurrent=32,
    )
    c.eval.passage_tokens = 2048  # enough for three passages of 'rag', however long
    # Two epochs of about 20,000 chains; neither rate nor epochs are published.
    c.sft.update(batch_size=64, steps=2 * 20_000 // 64)
    c.sft.update(lr=1e-5, warmup_steps=30, decay=True, sequence_tokens=8192)
    endpoint = {"source": full_scale.ENDPOINT, "name": ENGINE}
    c.models.writer.update(
        temperature=0.95, top_p=0.7, max_reply_tokens=1024, **endpoint
    )
    c.models.writer.max_prompt_tokens = 4096
    c.models.answerer.update(
        temperature=0.8, top_p=0.7, max_reply_tokens=64, **endpoint
    )
    stages = c.overrides.to_dict()
    # The policy searches 14 times, but learns from chains of up to 25 steps.
    stages["sft"] = {"rollout": {"max_searches": 24}}
    if words.no_reasoning:
        # Room for P_ablat, its example, and a paragraph for each sub-question.
        stages["curate"]["rollout"] = {"max_prompt_tokens": 4096}
    else:
        stages["curate"] |= {
            "model": {"source": TEACHER},
            "protocol": {"system": CHAINS_SYSTEM + CHAINS_EXAMPLE},
            "mesh": {"fsdp": 1, "tensor": 8},
            "rollout": {
                "temperature": 0.99,
                "top_p": 0.85,
                "max_turn_tokens": 256,
                "max_prompt_tokens": 4096,  # room for P_d with its example
                # The prefill of 24 rows takes the remaining memory of 80 GB devices.
                "max_concurrent": 24,
                "max_searches": 24,
                "max_written_tokens": 896,  # so that 24 fit the teacher's context
            },
        }
    c.overrides = ConfigDict(stages).lock()


def parity(c, words):
    """Follow the public code where the paper differs or says nothing."""
    stages = c.overrides.to_dict()
    stages["curate"]["curate"]["observations"] = "engine"
    c.overrides = ConfigDict(stages).lock()
    c.eval.answer_from = "log"
    c.retrieval.writer_prompt = "context_only"
    if not words.tiny:
        c.models.writer.top_p = 0.9
        c.retrieval.reranker = ""


def tiny(c, words):
    """Set the sizes for the embedded world."""
    tiny_world.set_tiny_world(c)
    c.retrieval.writer_prompt = "context_only"  # the prompt its writer was trained on
    expert = {"source": "world:expert", "max_concurrent": 128, "max_reply_tokens": 32}
    c.models.writer.update(max_prompt_tokens=80, **expert)
    c.models.answerer.update(max_prompt_tokens=160, **expert)
    stages = c.overrides.to_dict()
    stages["curate"]["curate"] |= {"max_steps": 5, "max_retries": 4}
    stages["curate"]["data"] = {"max_train": 512}
    stages["curate"]["model"] = {"source": "world:expert"}
    # A large model's nucleus and temperature are too noisy for one this small.
    stages["curate"]["rollout"] = {"temperature": 0.3}
    c.overrides = ConfigDict(stages).lock()
