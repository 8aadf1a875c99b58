"""What recipes share at the size of their papers: corpora, optimisers, machines.

Indexes are built once, with the command in each recipe's first lines; their folders are
named here, and --config.retrieval.index=... names another.
"""

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"  # public questions, all in one layout
KILT_INDEX = "indexes/kilt_100w_bge_large"
WIKI18_INDEX = "indexes/wiki18_100w_e5_base"
ENDPOINT = "http://localhost:8000/v1"  # OpenAI-compatible, where a paper asks an API


def questions(name, split):
    """One data set of FlashRAG's collection, as data.train and data.dev take it."""
    return f"{FLASHRAG}:{name}@{split}"


def kilt_with_bge(c, *, top_k):
    """KILT's Wikipedia of 2019 in 29 million passages of 100 words, by BGE-large.

    Passages are cut to 300 tokens, as RAG-R1's and R1-Searcher's code does.
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
    """Wikipedia of December 2018 in passages of 100 words, by E5-base.

    Args:
        c: the configuration.
        top_k: passages for one query.
        index: of another corpus.
        max_passage_tokens: of an encoded passage; 256 in Search-R1's code.
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
    """A published model, computed in bfloat16 around float32 master weights."""
    c.model.update(source=source, dtype="bfloat16", remat=True, logit_chunk=512)
    c.tokenizer.source = ""
    c.rollout.extend_chunk = 256  # each chunk reads all weights once


def verl_adamw(c):
    """AdamW as Search-R1, RAG-R1 and R-Search run it: verl's defaults."""
    c.optim.update(b1=0.9, b2=0.999, weight_decay=0.01, max_grad_norm=1.0)


def openrlhf_adamw(c):
    """Adam as R1-Searcher and R1-Searcher++ run it: OpenRLHF's defaults."""
    c.optim.update(b1=0.9, b2=0.95, weight_decay=0.0, max_grad_norm=1.0)


def eight_devices(c, *, tensor):
    """One node of eight; more nodes repeat it along mesh.data.

    Args:
        c: the configuration.
        tensor: parts of each matrix product; must divide the key and value heads.
    """
    c.mesh.update(data=-1, fsdp=8 // tensor, tensor=tensor)
    # Packing more conversations at once leaves less padding. The devices hold one piece
    # of the packed rows at a time, see rsearch/learn/packing.py.
    c.rl.micro_batch = c.sft.micro_batch = 64


def rare_saves(c, *, rl_steps, sft_steps=200):
    """Checkpoints and evaluations as far apart as runs of days need them."""
    c.checkpoint.update(rl_steps=rl_steps, sft_steps=sft_steps, keep=3)
    c.eval.update(at_start=False, methods=("protocol",), max_questions=500)
