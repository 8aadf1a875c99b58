"""RAG-R1's tables (arXiv 2507.02962)."""

from rsearch.evaluation.tables import (
    PaperColumn,
    PaperRow,
    PaperTable,
    TinyRow,
    average_of,
    columns_of,
)

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
EM = tuple(PaperColumn(name, "em", key) for name, key in SETS.items())
MULTI_HOP_EM = EM[3:]
TIME, RC = (
    columns_of({name: SETS[name] for name in ("HotpotQA", "2Wiki")}, {label: metric})
    for label, metric in (("Time", "seconds"), ("RC", "searches"))
)
# Without SFT, RL learns from the same questions as with it.
NO_SFT = ("stages=curate_sft,curate_rl,rl",)
# Seconds are measured one question at a time.
ONE_BY_ONE = ("rollout.max_concurrent=1",)

TABLE_3 = PaperTable(
    title="EM of all methods on seven sets",
    source="arXiv 2507.02962",
    caption=(
        "Exact match as a fraction, on whole test or development sets. Every method "
        "reads the 3 best passages of KILT's Wikipedia (100 words each, BGE-large). "
        "The paper trains only on HotpotQA."
    ),
    columns=(*EM, average_of("Avg.", EM)),
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
            tiny=TinyRow(),
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

TABLE_4 = PaperTable(
    title="without SFT, RL or the filter of questions",
    source="arXiv 2507.02962",
    caption=(
        "Exact match as a fraction, as in table 3. Without the filter, RL learns from "
        "all questions that were answered wrong and 25 % of the others."
    ),
    columns=(*MULTI_HOP_EM, average_of("Avg.", MULTI_HOP_EM)),
    rows=(
        PaperRow(
            "sq",
            "RAG-R1-sq",
            "0.474 0.481 0.181 0.432 0.392",
            QWEN,
            recipe="configs/rag_r1.py:sq",
            stage="rl",
        ),
        PaperRow(
            "sq_no_sft",
            "RAG-R1-sq w/o SFT",
            "0.415 0.406 0.138 0.312 0.318",
            QWEN,
            recipe="configs/rag_r1.py:sq",
            stage="rl",
            settings=NO_SFT,
        ),
        PaperRow(
            "sq_no_rl",
            "RAG-R1-sq w/o RL",
            "0.425 0.433 0.150 0.368 0.344",
            QWEN,
            recipe="configs/rag_r1.py:sq",
            stage="sft",
        ),
        PaperRow(
            "sq_no_filter",
            "RAG-R1-sq w/o Filter",
            "0.452 0.442 0.159 0.408 0.365",
            QWEN,
            recipe="configs/rag_r1.py:sq,no_filter",
            stage="rl",
        ),
        PaperRow(
            "mq",
            "RAG-R1-mq",
            "0.495 0.556 0.192 0.432 0.419",
            QWEN,
            recipe="configs/rag_r1.py",
            stage="rl",
        ),
        PaperRow(
            "mq_no_sft",
            "RAG-R1-mq w/o SFT",
            "0.413 0.423 0.129 0.392 0.339",
            QWEN,
            recipe="configs/rag_r1.py",
            stage="rl",
            settings=NO_SFT,
        ),
        PaperRow(
            "mq_no_rl",
            "RAG-R1-mq w/o RL",
            "0.427 0.490 0.143 0.424 0.371",
            QWEN,
            recipe="configs/rag_r1.py",
            stage="sft",
        ),
        PaperRow(
            "mq_no_filter",
            "RAG-R1-mq w/o Filter",
            "0.491 0.543 0.186 0.424 0.411",
            QWEN,
            recipe="configs/rag_r1.py:no_filter",
            stage="rl",
        ),
    ),
    settings={"retrieval.top_k": 3},
)

TABLE_5 = PaperTable(
    title="seconds and retrievals a question",
    source="arXiv 2507.02962",
    caption=(
        "Seconds and retrievals (RC) per question, on an A100 without any acceleration "
        "of inference. Ours are measured one question at a time, on your device."
    ),
    columns=(
        *(column for pair in zip(TIME, RC, strict=True) for column in pair),
        average_of("Avg. Time", TIME),
        average_of("Avg. RC", RC),
    ),
    rows=(
        PaperRow(
            "search_r1",
            "Search-R1",
            "7.79 2.44 8.90 3.01 8.35 2.73",
            QWEN,
            recipe="configs/search_r1.py:instruct",
            stage="rl",
            asking=ONE_BY_ONE,
        ),
        PaperRow(
            "r1_searcher",
            "R1-Searcher",
            "10.98 2.31 10.93 2.40 10.96 2.36",
            QWEN,
            recipe="configs/r1_searcher.py:llama",
            stage="rl_answer",
            settings=(f"model.source={QWEN}",),
            asking=ONE_BY_ONE,
            tiny=TinyRow(asking=ONE_BY_ONE),
        ),
        PaperRow(
            "sq",
            "RAG-R1-sq",
            "7.69 2.13 8.72 2.93 8.21 2.53",
            QWEN,
            recipe="configs/rag_r1.py:sq",
            stage="rl",
            asking=ONE_BY_ONE,
        ),
        PaperRow(
            "mq",
            "RAG-R1-mq",
            "6.72 1.87 8.11 2.42 7.42 2.15",
            QWEN,
            recipe="configs/rag_r1.py",
            stage="rl",
            asking=ONE_BY_ONE,
        ),
    ),
    settings={"retrieval.top_k": 3},
)

TABLES = {"3": TABLE_3, "4": TABLE_4, "5": TABLE_5}
