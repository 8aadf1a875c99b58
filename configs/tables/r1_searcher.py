"""R1-Searcher's tables (arXiv 2503.05592)."""

from rsearch.evaluation.tables import PaperRow, PaperSlip, PaperTable, columns_of

GPT = "gpt-4o-mini"  # of config.models.subject, at its endpoint
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
QWEN = "Qwen/Qwen2.5-7B"
NO_SCORES = "an endpoint gives no probabilities of a given text"
NO_MIXTURE = "an endpoint mixes no prompts token by token"
SETS = {
    "HotpotQA": "r1_searcher_hotpotqa",
    "2Wiki": "r1_searcher_2wikimultihopqa",
    "Bamboogle": "bamboogle",
    "Musique": "r1_searcher_musique",
}
METRICS = {"ACC_R": "cover_em", "ACC_L": "judge"}

TABLE_2 = PaperTable(
    title="cover EM and judge of all methods on four sets",
    source="arXiv 2503.05592",
    caption=(
        "Cover exact match (ACC_R) and the verdicts of GPT-4o-mini (ACC_L) as "
        "fractions, of 500 questions drawn from each development set and all 125 of "
        "Bamboogle. R1-Searcher reads the 5 best passages (KILT's Wikipedia, "
        "BGE-large); baselines follow ReARTeR's framework."
    ),
    columns=columns_of(SETS, METRICS),
    rows=(
        PaperRow(
            "direct_gpt",
            "Naive Generation",
            "0.324 0.404 0.348 0.346 0.240 0.280 0.134 0.170",
            GPT,
            method="direct",
        ),
        PaperRow(
            "rag_gpt",
            "Standard RAG",
            "0.342 0.450 0.344 0.292 0.272 0.328 0.172 0.188",
            GPT,
            method="rag",
        ),
        PaperRow(
            "sure_gpt",
            "SuRe",
            "0.270 0.380 0.244 0.264 0.168 0.208 0.128 0.146",
            GPT,
            method="sure",
        ),
        PaperRow(
            "replug_gpt",
            "REPLUG",
            "0.350 0.428 0.296 0.254 0.224 0.256 0.132 0.138",
            GPT,
            reason=NO_MIXTURE,
        ),
        PaperRow(
            "longllmlingua_gpt",
            "LongLLMlingua",
            "0.358 0.450 0.324 0.316 0.248 0.288 0.150 0.172",
            GPT,
            reason=NO_SCORES,
        ),
        PaperRow(
            "recomp_gpt",
            "RECOMP",
            "0.332 0.398 0.298 0.306 0.136 0.176 0.118 0.134",
            GPT,
            reason=NO_SCORES,
        ),
        PaperRow(
            "selective_context_gpt",
            "Selective-Context",
            "0.366 0.442 0.350 0.290 0.240 0.288 0.152 0.172",
            GPT,
            reason=NO_SCORES,
        ),
        PaperRow(
            "skr_gpt",
            "SKR",
            "0.360 0.454 0.364 0.314 0.248 0.288 0.162 0.174",
            GPT,
            method="skr",
        ),
        PaperRow(
            "self_ask_gpt",
            "Self-Ask",
            "0.392 0.462 0.336 0.478 0.336 0.416 0.260 0.270",
            GPT,
            method="self_ask",
        ),
        PaperRow(
            "iter_retgen_gpt",
            "Iter-RetGen",
            "0.374 0.456 0.326 0.270 0.232 0.256 0.178 0.188",
            GPT,
            method="iter_retgen",
        ),
        PaperRow(
            "ircot_gpt",
            "IRCoT",
            "0.434 0.308 0.492 0.114 0.272 0.184 0.192 0.214",
            GPT,
            method="ircot",
        ),
        PaperRow(
            "cr_planner_gpt",
            "CR-Planner",
            "0.404 0.416 0.520 0.478 0.488 0.524 0.272 0.262",
            GPT,
            method="cr_planner",
        ),
        PaperRow(
            "rearter_gpt",
            "ReARTeR",
            "0.468 0.506 0.554 0.534 0.496 0.544 0.296 0.302",
            GPT,
            method="rearter",
        ),
        PaperRow(
            "direct_llama",
            "Naive Generation",
            "0.208 0.268 0.326 0.254 0.144 0.168 0.068 0.096",
            LLAMA,
            method="direct",
        ),
        PaperRow(
            "rag_llama",
            "Standard RAG",
            "0.334 0.398 0.336 0.212 0.168 0.216 0.104 0.098",
            LLAMA,
            method="rag",
        ),
        PaperRow(
            "sure_llama",
            "SuRe",
            "0.266 0.346 0.122 0.262 0.160 0.192 0.106 0.144",
            LLAMA,
            method="sure",
        ),
        PaperRow(
            "replug_llama",
            "REPLUG",
            "0.290 0.348 0.334 0.204 0.168 0.232 0.078 0.090",
            LLAMA,
            method="replug",
        ),
        PaperRow(
            "longllmlingua_llama",
            "LongLLMlingua",
            "0.314 0.382 0.304 0.294 0.168 0.216 0.088 0.100",
            LLAMA,
            method="longllmlingua",
        ),
        PaperRow(
            "recomp_llama",
            "RECOMP",
            "0.318 0.380 0.324 0.322 0.104 0.160 0.112 0.126",
            LLAMA,
            method="recomp_extractive",
        ),
        PaperRow(
            "selective_context_llama",
            "Selective-Context",
            "0.296 0.358 0.266 0.204 0.144 0.200 0.092 0.104",
            LLAMA,
            method="selective_context",
        ),
        PaperRow(
            "skr_llama",
            "SKR",
            "0.300 0.372 0.336 0.212 0.176 0.208 0.100 0.112",
            LLAMA,
            method="skr",
        ),
        PaperRow(
            "self_ask_llama",
            "Self-Ask",
            "0.316 0.408 0.306 0.322 0.360 0.432 0.222 0.226",
            LLAMA,
            method="self_ask",
        ),
        PaperRow(
            "iter_retgen_llama",
            "Iter-RetGen",
            "0.302 0.362 0.310 0.224 0.144 0.176 0.084 0.084",
            LLAMA,
            method="iter_retgen",
        ),
        PaperRow(
            "ircot_llama",
            "IRCoT",
            "0.210 0.146 0.338 0.312 0.120 0.104 0.060 0.042",
            LLAMA,
            method="ircot",
        ),
        PaperRow(
            "cr_planner_llama",
            "CR-Planer",
            "0.332 0.350 0.420 0.350 0.304 0.336 0.144 0.098",
            LLAMA,
            method="cr_planner",
        ),
        PaperRow(
            "rearter_llama",
            "ReARTeR",
            "0.424 0.434 0.470 0.364 0.438 0.484 0.244 0.252",
            LLAMA,
            method="rearter",
        ),
        PaperRow(
            "marco_o1",
            "Marco-o1",
            "0.352 0.348 0.442 0.184 0.224 0.200 0.134 0.104",
            "AIDC-AI/Marco-o1",
            method="rag",
        ),
        PaperRow(
            "skywork_o1",
            "Skywork-o1",
            "0.306 0.256 0.344 0.190 0.176 0.160 0.092 0.060",
            "Skywork/Skywork-o1-Open-Llama-3.1-8B",
            method="rag",
        ),
        PaperRow(
            "ours_llama",
            "R1-Searcher",
            "0.648 0.746 0.594 0.628 0.504 0.544 0.254 0.282",
            LLAMA,
            recipe="configs/r1_searcher.py:llama",
            stage="rl_answer",
        ),
        PaperRow(
            "ours_qwen",
            "R1-Searcher",
            "0.654 0.750 0.636 0.650 0.528 0.544 0.282 0.314",
            QWEN,
            recipe="configs/r1_searcher.py",
            stage="rl_answer",
        ),
    ),
    slips=(
        PaperSlip(
            "cr_planner_gpt", ("Bamboogle ACC_L",), "0.524 is no share of 125 questions"
        ),
        PaperSlip(
            "rearter_llama",
            ("Bamboogle ACC_R", "Bamboogle ACC_L"),
            "0.438 and 0.484 are no shares of 125 questions",
        ),
    ),
)

TABLES = {"2": TABLE_2}
