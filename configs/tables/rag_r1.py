"""RAG-R1's tables (arXiv 2507.02962)."""

from rsearch.evaluation.tables import PaperColumn, PaperRow, PaperTable

QWEN = "Qwen/Qwen2.5-7B-Instruct"
SETS = {
    "NQ": "nq",
    "PopQA": "popqa",
    "TriviaQA": "triviaqa",
    "HotpotQA": "hotpotqa",
    "2Wiki": "2wikimultihopqa",
    "Musique": "musique",
    "Bamboogle": "bamboogle",
}

TABLE_3 = PaperTable(
    source="arXiv 2507.02962",
    caption=(
        "Exact match as a fraction, of whole test or development sets. Every method "
        "reads the 3 best passages of KILT's Wikipedia (100 words each, BGE-large). "
        "The paper trains on HotpotQA alone."
    ),
    columns=(
        *(PaperColumn(name, "em", key) for name, key in SETS.items()),
        PaperColumn("Avg.", mean_of=tuple(SETS)),
    ),
    rows=(
        PaperRow(
            "direct",
            "Direct Inference",
            "0.132 0.148 0.360 0.183 0.236 0.031 0.080 0.167",
            QWEN,
            method="direct",
        ),
        PaperRow(
            "rag",
            "Standard RAG",
            "0.328 0.353 0.476 0.284 0.253 0.048 0.152 0.271",
            QWEN,
            method="rag",
        ),
        PaperRow(
            "ircot",
            "IRCoT",
            "0.183 0.328 0.434 0.276 0.356 0.060 0.144 0.254",
            QWEN,
            method="ircot",
        ),
        PaperRow(
            "search_o1",
            "Search-o1",
            "0.277 0.294 0.474 0.348 0.384 0.107 0.296 0.311",
            QWEN,
            method="search_o1",
        ),
        PaperRow(
            "search_r1",
            "Search-R1",
            "0.387 0.422 0.531 0.377 0.351 0.135 0.376 0.368",
            QWEN,
            recipe="configs/search_r1.py:instruct",
            stage="rl",
        ),
        PaperRow(
            "r1_searcher",
            "R1-Searcher",
            "0.404 0.410 0.522 0.442 0.513 0.158 0.368 0.402",
            QWEN,
            recipe="configs/r1_searcher.py:llama",
            stage="rl_answer",
            settings=(f"model.source={QWEN}",),
        ),
        PaperRow(
            "sq",
            "RAG-R1-sq",
            "0.429 0.477 0.599 0.474 0.481 0.181 0.432 0.439",
            QWEN,
            recipe="configs/rag_r1.py:sq",
            stage="rl",
        ),
        PaperRow(
            "mq",
            "RAG-R1-mq",
            "0.423 0.479 0.608 0.495 0.556 0.192 0.432 0.455",
            QWEN,
            recipe="configs/rag_r1.py",
            stage="rl",
        ),
    ),
    settings={"retrieval.top_k": 3},
)

TABLES = {"3": TABLE_3}
