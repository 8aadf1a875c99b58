"""Settings that recipes share at the papers' scale: corpora, optimisers, machines.

Indexes are built once, with the command in each recipe's docstring; their folders are
named here, and --config.retrieval.index=... overrides them.
"""

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"  # public question sets, all in one format
KILT_INDEX = "indexes/kilt_100w_bge_large"
WIKI18_INDEX = "indexes/wiki18_100w_e5_base"
ENDPOINT = "http://localhost:8000/v1"  # OpenAI-compatible, for papers that call an API


def questions(name, split):
    """Return the source of a FlashRAG data set, for data.train and data.dev."""
    return f"{FLASHRAG}:{name}@{split}"


def kilt_with_bge(c, *, top_k):
    """Search KILT's Wikipedia of 2019 with BGE-large: 29 million 100-word passages.

    Passages are truncated to 300 tokens, as in RAG-R1's and R1-Searcher's code.
    """
    c.retrieval.update(
        corpus="",
        index=KILT_INDEX,
        encoder="BAAI/bge-large-en-v1.5",
        family="bge",
        max_passage_tokens=300,
        max_query_tokens=256,
        top_k=top_k,
    )


def wiki18_with_e5(c, *, top_k, index=WIKI18_INDEX, max_passage_tokens=256):
    """Search the Wikipedia of December 2018 with E5-base, in passages of 100 words.

    Args:
        c: the configuration.
        top_k: passages per query.
        index: directory of the index; another one may be of another corpus.
        max_passage_tokens: tokens of an encoded passage; 256 in Search-R1's code.
    """
    c.retrieval.update(
        corpus="",
        index=index,
        encoder="intfloat/e5-base-v2",
        family="e5",
        max_passage_tokens=max_passage_tokens,
        max_query_tokens=256,
        top_k=top_k,
    )


def backbone(c, source):
    """Start from a published model, in bfloat16 with float32 master weights."""
    c.model.update(source=source, dtype="bfloat16", remat=True, logit_chunk=512)
    c.tokenizer.source = ""
    c.rollout.extend_chunk = 256  # large, since each chunk reads all weights once


def verl_adamw(c):
    """Set AdamW as in Search-R1, RAG-R1 and R-Search: verl's defaults."""
    c.optim.update(b1=0.9, b2=0.999, weight_decay=0.01, max_grad_norm=1.0)


def openrlhf_adamw(c):
    """Set Adam as in R1-Searcher and R1-Searcher++: OpenRLHF's defaults."""
    c.optim.update(b1=0.9, b2=0.95, weight_decay=0.0, max_grad_norm=1.0)


def eight_devices(c, *, tensor):
    """Set the mesh for a node of eight devices; more nodes repeat it along mesh.data.

    Args:
        c: the configuration.
        tensor: shards of each matrix product; must divide the key and value heads.
    """
    c.mesh.update(data=-1, fsdp=8 // tensor, tensor=tensor)
    # Packing more conversations together leaves less padding. The devices hold only one
    # piece of the packed rows at a time, see rsearch/learn/packing.py.
    c.rl.micro_batch = c.sft.micro_batch = 64


def sparse_checkpoints(c, *, rl_steps):
    """Space out checkpoints and evaluations for runs that take days."""
    c.checkpoint.update(rl_steps=rl_steps, sft_steps=200, keep=3)
    c.eval.update(at_start=False, methods=("protocol",), max_questions=500)
