"""Every field of a configuration: its default, meaning, unit and bound.

The default sizes are those of a small decoder on the embedded world. A recipe starts
from `get_config()` and sets only what differs; configs/quickstart.py is the simplest. A
field marked `may_change` may have another value when a run resumes. Checks of fields
that must fit together, such as sizes that divide each other, are in
`rsearch/config/checks.py`.

Sizes of text are counted in tokens, learning rates are per optimiser step, and "rows"
are rollouts (RL) or demonstrations (SFT).
"""

from ml_collections import ConfigDict

from rsearch.config.spec import (
    Bound,
    Field,
    Section,
    above,
    at_least,
    between,
    between_exclusive,
    from_below,
    matching,
    multiple_of,
    one_of,
    or_value,
    some_of,
    text_with,
    up_to,
    words_or_reference,
)
from rsearch.config.stage_plan import ROLES, STAGE_PREFIX, is_stage

SHARE = between(0, 1)
MIN_TEMPERATURE = 1e-6  # logits divided by a smaller number overflow
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")  # of a decoder block
NORMALIZERS = ("squad", "r1_searcher", "flashrag")
DTYPES = ("float32", "bfloat16")
TRACKERS = ("wandb", "trackio", "mlflow")
WORLD_KINDS = ("single", "bridge", "three_hop", "four_hop", "comparison")
WORLD_KINDS += ("unanswerable",)  # no passage has their answers
CURATE_METHODS = ("segments", "whole", "answerable", "difficulty", "mix")
CURATE_METHODS += ("both_knowledge", "rewriter", "chains", "no_reasoning", "self_rag")
CURATE_METHODS += ("self_ask", "oracle")
ALGORITHMS = ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo")
MIX = r"(\S+ )?(easy|medium|hard) (\d+(:\d*)?|0?\.\d+)"  # an entry of curate.mix

MODEL = Section(
    "The network. If source is set, its config.json gives the shape, not these fields.",
    source=Field("", "Hugging Face directory or hub id; '' = random weights"),
    num_layers=Field(4, "decoder blocks", at_least(1)),
    width=Field(128, "features of the residual stream", at_least(1)),
    num_heads=Field(4, "query heads", at_least(1)),
    num_kv_heads=Field(2, "key and value heads; must divide num_heads", at_least(1)),
    head_dim=Field(
        32,
        "features of one head; even, because they are rotated in pairs",
        multiple_of(2, "an even number >= 2"),
    ),
    mlp_width=Field(384, "features inside the gated MLP", at_least(1)),
    vocab_size=Field(
        0, "rows of the embedding; 0 = the tokenizer's number of ids", at_least(0)
    ),
    rope_theta=Field(10_000.0, "base of the rotary wavelengths", above(0)),
    tie_embeddings=Field(True, "use one matrix to embed tokens and to compute logits"),
    qkv_bias=Field(False, "biases on query, key and value projections (qwen2: True)"),
    dtype=Field(
        "float32",
        "dtype of the computation; master weights are always float32",
        one_of(DTYPES),
    ),
    remat=Field(
        False,
        "recompute activations in the backward pass: less memory, more time",
        may_change=True,
    ),
    logit_chunk=Field(
        1024,
        "tokens whose logits are in memory at a time in training",
        at_least(1),
        may_change=True,
    ),
    offload=Field(
        (),
        "what is kept in host memory while it is not in use: the weights that a stage "
        "began with ('reference'), Adam's moments ('optimizer')",
        some_of(("reference", "optimizer"), may_be_empty=True),
        may_change=True,
    ),
    lora_rank=Field(
        0,
        "rank of the LoRA adapters (r): a stage trains adapters on frozen weights and "
        "merges them when it ends; 0 = a stage trains all weights",
        at_least(0),
    ),
    lora_alpha=Field(
        16.0, "an adapter's product is scaled by lora_alpha / lora_rank", above(0)
    ),
    lora_matrices=Field(MATRICES, "matrices that have an adapter", some_of(MATRICES)),
)

TOKENIZER = Section(
    "Text to token ids and back.",
    source=Field(
        "world",
        "directory or hub id; '' = model.source; 'world' = the embedded world's",
    ),
)

PROTOCOL = Section(
    "The text format in which the policy and its tools exchange messages.",
    name=Field("search_r1", "a key of PROTOCOLS, or your own, 'package.module:name'"),
    tools=Field(
        (),
        "tools that a turn may call in addition to search, as <name> argument </name>: "
        "keys of TOOLS such as 'open', or your own, 'package.module:name'; the prompt "
        "must tell the policy about them",
    ),
    max_queries=Field(
        0,
        "rag_r1_mq: queries per turn that are searched; 0 = the number in its prompt",
        at_least(0),
    ),
    quotes_keep_commas=Field(
        True, "rag_r1_mq: a comma in double quotes does not separate queries"
    ),
    json_ascii=Field(False, "rag_r1_mq: results are escaped to ASCII"),
    instruction=Field(
        None,
        "replaces the protocol's messages; must contain {question}",
        text_with("{question}"),
        kind=str,
    ),
    system=Field(None, "replaces the protocol's system message", kind=str),
    invalid_message=Field(
        None, "replaces the message that follows a malformed turn", kind=str
    ),
    direct=Field(
        None,
        "replaces the messages of method 'direct'; must contain {question}",
        text_with("{question}"),
        kind=str,
    ),
    rewrite=Field(
        None,
        "replaces the messages to the rewriter; must contain {document} and {question}",
        text_with("{document}", "{question}"),
        kind=str,
    ),
    rag=Field(
        None,
        "replaces the messages of method 'rag'; must contain {passages} and {question}",
        text_with("{passages}", "{question}"),
        kind=str,
    ),
)

DATA = Section(
    "Questions.",
    train=Field(
        "world:train",
        "training questions: file, hub id, set:NAME, world:train, or stage:<name> = "
        "those that a curate stage has selected",
    ),
    dev=Field(
        "world:dev",
        "held-out questions: file, hub id, set:NAME, stage:<name>, world:dev, one kind "
        "of the latter, such as world:bridge, or, to label them, world:train",
        may_change=True,
    ),
    fields_question=Field(
        "", "name of the field with a record's question; '' = that of its format"
    ),
    fields_answers=Field(
        "", "name of the field with the golden answers; '' = that of the format"
    ),
    fields_id=Field("", "name of the field with the id; '' = that of the format"),
    max_train=Field(0, "questions of train that are used; 0 = all", at_least(0)),
    max_dev=Field(
        0, "questions of dev that are used; 0 = all", at_least(0), may_change=True
    ),
    decontaminate=Field(False, "drop training questions that are also in dev"),
    on_bad=Field(
        "raise",
        "a bad record among questions, demonstrations or the corpus ends the run with "
        "an error naming its line ('raise'), or is left out and counted ('skip')",
        one_of(("raise", "skip")),
    ),
)

WORLD = Section(
    "The embedded synthetic world, made from config.seed if a field names 'world'.",
    people=Field(
        400, "people, each with a birthplace, employer and year of birth", at_least(1)
    ),
    films=Field(300, "films, each with a director and a year", at_least(1)),
    companies=Field(60, "companies, each with a seat", at_least(1)),
    cities=Field(60, "cities, each with a country", at_least(1)),
    train_questions=Field(1_400, "training questions", at_least(1)),
    dev_questions=Field(
        200, "held-out questions, about head entities unseen in training", at_least(1)
    ),
    kinds=Field(WORLD_KINDS, "kinds of questions", some_of(WORLD_KINDS)),
    known_share=Field(
        0.2, "share of the entities whose facts pretraining teaches", between(0, 1)
    ),
    missing_share=Field(
        0.15,
        "share of the people who lack a fact, if the kinds include 'unanswerable'",
        between(0, 1),
    ),
    distractors=Field(
        100, "passages about near-homonyms that no question is about", at_least(0)
    ),
)

RETRIEVAL = Section(
    "The corpus, its index and how it is searched.",
    corpus=Field(
        "world",
        "JSONL of {'id', 'contents'}; '' = the index's corpus; 'world' = the embedded "
        "world's; 'paragraphs' = in an evaluation, those that come with each question",
    ),
    corpus_words=Field(
        0,
        "'paragraphs': fill each question's corpus up to this many words with the "
        "paragraphs of other questions; 0 adds none",
        at_least(0),
    ),
    corpus_cache=Field(
        "",
        "directory for the corpus's offsets; '' = next to the corpus, or in the index "
        "if only the index names the corpus and it lies in another directory",
        may_change=True,
    ),
    index=Field(
        "",
        "directory written by rsearch.index; the world needs none. 'paragraphs' are "
        "searched by the encoder's vectors ('') or by 'bm25'",
        may_change=True,  # a run is bound to the fingerprint of its contents
    ),
    bm25_index=Field(
        "",
        "directory written by rsearch.index --kind=bm25; its passages are merged with "
        "the index's by reciprocal rank; '' = none",
        may_change=True,  # as for the index
    ),
    sharded=Field(
        False,
        "several hosts: each holds its share of the index's parts",
        may_change=True,
    ),
    on_devices=Field(
        False,
        "hold the index's vectors on each host's accelerators, 2 bytes per dimension, "
        "and compare all of them: an exact search, whatever the index's kind",
        may_change=True,  # a run is bound to the passages that are found
    ),
    timeout_seconds=Field(
        25.0,
        "seconds within which a service, or every host of a sharded index, must answer",
        above(0),
        may_change=True,
    ),
    engine=Field(
        "",
        "'package.module:name' of your own function (queries) -> passages of each "
        "query, best first, or None if its search failed; '' = corpus and index",
        words_or_reference(("",)),
    ),
    url=Field(
        "",
        "URL of a retrieval service to use in place of an index",
        may_change=True,  # a run is bound to its fingerprint
    ),
    api=Field(
        "search_r1",
        "the service's API; 'serper' searches the open web",
        one_of(("search_r1", "r1_searcher", "rearag", "serper")),
    ),
    fetch_pages=Field(False, "'serper': passages are the pages' text, not snippets"),
    page_chars=Field(2000, "characters of a fetched page that are used", at_least(1)),
    site=Field(
        "", "'serper': the only host searched, such as 'en.wikipedia.org'; '' = all"
    ),
    api_key_env=Field(
        "", "environment variable with the service's key; '' = none", may_change=True
    ),
    key_over_http=Field(
        False,
        "allow the key to be sent to another machine without encryption",
        may_change=True,
    ),
    max_retries=Field(
        3,
        "retries of a call after a failure that may be temporary",
        at_least(0),
        may_change=True,
    ),
    outage_seconds=Field(
        300.0,
        "seconds that the service, or a model at an endpoint, may be unreachable "
        "before the run is saved and ends",
        at_least(0),
        may_change=True,
    ),
    search_seconds=Field(
        1800.0,
        "seconds after which a search counts as stuck and the run ends",
        above(0),
        may_change=True,
    ),
    encoder=Field(
        "hashed", "'hashed' n-grams, or a directory or hub id of a BERT model"
    ),
    family=Field(
        "minilm",
        "the encoder's prefixes and pooling; 'declared' = as its directory declares",
        one_of(("minilm", "e5", "bge", "declared")),
    ),
    max_query_tokens=Field(
        0,
        "longer queries are truncated before encoding; 0 = the model's limit",
        at_least(0),
    ),
    max_passage_tokens=Field(
        0,
        "longer passages are truncated before encoding, as they were in the index; 0 = "
        "the model's limit",
        at_least(0),
    ),
    top_k=Field(1, "passages per query", at_least(1)),
    reranker=Field("", "directory or hub id of a BERT cross-encoder; '' = none"),
    rerank_from=Field(10, "passages per query that the reranker orders", at_least(1)),
    cache_size=Field(
        10_000,
        "queries whose results are cached; 0 = none",
        at_least(0),
        may_change=True,
    ),
    hashed_dim=Field(512, "features of the hashed encoder's vectors", at_least(1)),
    writer_prompt=Field(
        "context_only",
        "what models.writer is asked for: an answer, as in ReaRAG's code "
        "('context_only') or in its paper ('unless_comparison'), or a summary of the "
        "first passage that is about the query, as in R1-Searcher's online search "
        "('page_summary')",
        one_of(("context_only", "unless_comparison", "page_summary")),
    ),
)

ROLLOUT = Section(
    "Sampling of conversations: a prompt, then alternating turns and observations.",
    group_size=Field(8, "rollouts per question (G)", at_least(1)),
    max_searches=Field(
        2,
        "turns in which the policy may search or call a tool; one more turn follows",
        between(0, 98),
    ),
    forced_final_turn=Field(True, "False: no turn follows the last search"),
    on_invalid=Field(
        "message",
        "what follows a malformed turn: the protocol's 'message', or the 'end'",
        one_of(("message", "end")),
    ),
    max_turn_tokens=Field(18, "tokens the policy may write in one turn", at_least(1)),
    max_observation_tokens=Field(22, "tokens of retrieved text per query", at_least(1)),
    max_written_tokens=Field(
        0,
        "tokens of an observation written by models.writer; 0 = max_observation_tokens",
        at_least(0),
    ),
    cut_tags=Field(
        False,
        "count the tags as retrieved text, so that truncation cuts the closing tag",
    ),
    max_prompt_tokens=Field(
        16,
        "training questions with longer prompts are left out and reported; for dev see "
        "eval.drop_long",
        at_least(1),
    ),
    context_tokens=Field(
        0,
        "tokens of a whole rollout, which ends when another turn would not fit; 0 = "
        "the most that the other limits allow",
        at_least(0),
    ),
    temperature=Field(
        1.0,
        "sampling temperature in training; see eval.temperature for evaluation",
        at_least(MIN_TEMPERATURE),
    ),
    top_p=Field(
        1.0, "smallest probability mass kept when sampling; 1 = all", up_to(0, 1)
    ),
    max_concurrent=Field(
        256,
        "rollouts that a host decodes at a time, in training and evaluation; 0 = those "
        "of a step, or as many as fit in memory: see docs/memory.md",
        at_least(0),
        may_change=True,
    ),
    cache_tokens=Field(
        0,
        "total tokens in the KV cache; 0 = max_concurrent x the longest rollout",
        at_least(0),
        may_change=True,
    ),
    page_tokens=Field(
        128,
        "tokens in a page of the KV cache, if cache_tokens is set",
        multiple_of(16, "a multiple of 16: whole tiles of an accelerator's memory"),
        may_change=True,
    ),
    devices=Field(
        0,
        "devices of the machine that only roll out, with rl.max_staleness = 1; the "
        "others form the mesh. 0 = all devices learn and roll out",
        at_least(0),
        may_change=True,
    ),
    global_mesh=Field(
        False,
        "several hosts: decode with one program over all devices, for a model that no "
        "host can hold; see docs/several_hosts.md",
        may_change=True,
    ),
    int8_kernels=Field(
        False,
        "sample the rollouts of RL steps with the layers' matrices in 8 bits, which "
        "take half the memory and bandwidth of bfloat16; see docs/memory.md",
    ),
    extend_chunk=Field(
        32,
        "tokens of an observation per row that one call of the model reads",
        at_least(1),
        may_change=True,
    ),
)

CURATE = Section(
    "Data stage: select training data by the model's rollouts of train's questions.",
    method=Field(
        "segments",
        "a key of METHODS in rsearch/stages/curate/run.py, or your own",
        words_or_reference(CURATE_METHODS),
    ),
    measure=Field(
        "em",
        "an answer is right if its 'em' or 'cover_em' is 1, or its 'f1' above 0",
        one_of(("em", "cover_em", "f1")),
    ),
    order=Field(
        "any",
        "how an answer's words must stand together for 'cover_em', and in passages for "
        "method 'oracle'",
        one_of(("any", "contiguous", "substring")),
    ),
    max_words=Field(
        0,
        "an answer with more words is wrong, whatever the measure; 0 = no limit",
        at_least(0),
    ),
    normalize=Field("squad", "how answers are normalised", one_of(NORMALIZERS)),
    rollouts=Field(
        1,
        "rollouts per question, at most; stops early once enough are right",
        at_least(1),
    ),
    per_question=Field(1, "rollouts kept per question, at most", at_least(1)),
    max_kept=Field(0, "questions kept, drawn by config.seed; 0 = all", at_least(0)),
    first=Field(
        "",
        "'stage:<name>' takes that stage's rollouts as the first",
        Bound(lambda x: x == "" or x.startswith(STAGE_PREFIX), "'' or 'stage:<name>'"),
    ),
    retry_temperature=Field(
        1.2,
        "'answerable': temperature of the retries of questions that were wrong",
        at_least(MIN_TEMPERATURE),
    ),
    retry_rollouts=Field(
        10,
        "'answerable': retries of such a question, at most, until one is right; 0 "
        "keeps all of these questions",
        at_least(0),
    ),
    retry_searches=Field(
        10, "'answerable': turns of a retry in which it may search", at_least(0)
    ),
    right_share=Field(
        0.25,
        "'answerable': share of the questions right at first that are kept",
        between(0, 1),
    ),
    easy_below=Field(
        10,
        "'difficulty', 'mix': a question first right in an earlier rollout is easy",
        at_least(1),
    ),
    hard_above=Field(
        20,
        "'difficulty', 'mix': one first right in a later rollout is hard; the rest are "
        "medium",
        at_least(1),
    ),
    keep_unsolved=Field(
        True,
        "'difficulty', 'mix': a question that is wrong in hard_above rollouts or more, "
        "and never right, is hard; False leaves it out",
    ),
    mix=Field(
        ("easy 0:", "medium 0:", "hard 0:"),
        "'difficulty', 'mix': entries '[data_source] difficulty number': 'medium 200', "
        "'hotpotqa hard 2000', 'easy 0.5' for a share, 'medium 200:350' for the 150 "
        "after the first 200",
        matching(
            MIX,
            "texts such as 'medium 200', 'hotpotqa hard 2000', 'easy 0.5', "
            "'hard 10:20'",
        ),
    ),
    max_steps=Field(25, "'chains': Thought and Action pairs in a chain", at_least(1)),
    max_retries=Field(
        20, "'chains': unusable steps resampled in one chain, in total", at_least(0)
    ),
    observations=Field(
        "engine",
        "'chains': observations come from the search 'engine' or the 'gold' passages",
        one_of(("engine", "gold")),
    ),
    searches=Field(
        "gold",
        "'oracle': demonstrations search for each 'gold' passage, only for the "
        "'question', or not at all ('none'); the questions are the same",
        one_of(("gold", "question", "none")),
    ),
    recover_share=Field(
        0.25,
        "'oracle', 'gold' searches: share of the kept questions whose demonstration "
        "first searches with the question itself and misses a gold passage",
        between(0, 1),
    ),
    labels=Field(
        "",
        "'self_rag': a transcripts.jsonl with rows of direct and rag on data.train",
    ),
)

SFT = Section(
    "Supervised stage: cross-entropy on the policy's tokens of demonstrations.",
    demonstrations=Field(
        "world",
        "JSONL of {'question', 'turns'}; 'world' = the embedded ones; 'stage:<name>' = "
        "those of a curate stage",
    ),
    chats=Field(
        "",
        "JSONL of {'messages'}: general chats to mix in, whose last reply is learnt; "
        "'' = none",
    ),
    chats_share=Field(
        0.5,
        "share of chats in the training data; they are drawn by config.seed, and "
        "repeated if there are too few",
        between_exclusive(0, 1),
    ),
    steps=Field(360, "optimiser steps", at_least(0)),
    batch_size=Field(64, "demonstrations per step", at_least(1)),
    micro_batch=Field(
        64,
        "demonstrations per forward and backward pass",
        at_least(1),
        may_change=True,
    ),
    sequence_tokens=Field(
        88, "tokens of a demonstration, padding included", at_least(2)
    ),
    lr=Field(3e-3, "peak learning rate", at_least(0)),
    warmup_steps=Field(
        20,
        "steps of linear warm-up; the first has a rate of lr / warmup_steps",
        at_least(0),
    ),
    decay=Field(False, "decay linearly to a tenth of lr at the last step"),
    loss_mean=Field(
        "token",
        "mean over all tokens of a step, or over each 'sequence' first",
        one_of(("token", "sequence")),
    ),
    validation_share=Field(
        0.0,
        "share of the demonstrations' prompts held out for a validation loss, which is "
        "in metrics.jsonl; drawn by config.seed; 0 = none",
        from_below(0, 1),
    ),
    validate_every=Field(
        100,
        "steps between validation losses; the last step always has one",
        at_least(1),
    ),
    keep=Field(
        "last",
        "weights that the stage ends with: those after its 'last' step, or those with "
        "the 'lowest_loss' on the held-out demonstrations",
        one_of(("last", "lowest_loss")),
    ),
    repeats=Field(
        2,
        "demonstrations of each world question, each with its own flaw or none",
        at_least(1),
    ),
    flawed_share=Field(
        0.72,
        "share of the world's demonstrations that do not reach the answer",
        between(0, 1),
    ),
    guess_share=Field(
        0.12,
        "share of the flawed ones that guess without searching; the others stop before "
        "the last search",
        between(0, 1),
    ),
    baseline_share=Field(
        0.05,
        "additional demonstrations that answer as 'direct' and 'rag', as a share of "
        "the others",
        between(0, 1),
    ),
    recall_share=Field(
        0.0,
        "share of flawless ones about known entities that recall the facts",
        between(0, 1),
    ),
)

RL = Section(
    "Reinforcement stage. Sources of the formulas are in rsearch/learn.",
    steps=Field(
        16, "RL steps: roll out, reward, updates_per_step optimiser steps", at_least(0)
    ),
    questions_per_step=Field(32, "groups per step", at_least(1)),
    updates_per_step=Field(1, "optimiser steps on one step's rollouts", at_least(1)),
    max_staleness=Field(
        0,
        "1 = sample a step's rollouts during the update of the step before, with the "
        "policy from before that update; see docs/one_step_ahead.md",
        between(0, 1),
    ),
    micro_batch=Field(
        128,
        "rows per forward and backward pass",
        at_least(1),
        may_change=True,
        fixed_by=("rl.loss_mean", "micro_token"),
    ),
    lr=Field(6e-4, "peak learning rate", at_least(0)),
    warmup_steps=Field(0, "optimiser steps of linear warm-up", at_least(0)),
    decay=Field(False, "decay linearly to a tenth of lr at the last step"),
    lr_first_step_zero=Field(
        False,
        "verl's schedule: warmup_steps are RL steps, and the first has a rate of 0",
    ),
    algorithm=Field(
        "grpo",
        "a rollout's reward is compared with its group's ('grpo', 'rloo'), with all of "
        "the step's ('reinforce_pp'), with the group's and then the step's "
        "('reinforce_pp_baseline'), or with a value model's estimate ('ppo')",
        one_of(ALGORITHMS),
    ),
    advantage_mask=Field(
        "policy",
        "tokens in GAE, critic and whitening: the 'policy' tokens or the whole "
        "'response'",
        one_of(("policy", "response")),
    ),
    gamma=Field(1.0, "'ppo': discount of a reward, per token", between(0, 1)),
    gae_lambda=Field(
        1.0, "'ppo': 1 = full returns, 0 = one token and then the value", between(0, 1)
    ),
    normalize_std=Field(True, "'grpo': divide by the group's standard deviation"),
    std_eps=Field(1e-6, "'grpo': added to that deviation", above(0)),
    std_ddof=Field(
        1, "'grpo': sample (1) or population (0) standard deviation", between(0, 1)
    ),
    old_logprobs=Field(
        "sampler",
        "log-probs in the ratio's denominator: the 'sampler' has them, or 'recompute' "
        "with the trainer",
        one_of(("sampler", "recompute")),
    ),
    tis_cap=Field(
        0.0,
        "cap of a token's weight, recomputed / sampled probability; 0 = no weight",
        at_least(0),
    ),
    loss=Field(
        "",
        "'package.module:name' of your own per-token loss, a function like "
        "clipped_surrogate of rsearch/learn/losses.py; '' = that one",
        words_or_reference(("",)),
    ),
    ratio=Field(
        "token",
        "probability ratio per 'token', or per 'sequence' (GSPO)",
        one_of(("token", "sequence")),
    ),
    clip_low=Field(
        0.2, "the ratio is kept above 1 - clip_low", between_exclusive(0, 1)
    ),
    clip_high=Field(0.2, "the ratio is kept below 1 + clip_high", above(0)),
    dual_clip=Field(
        0.0,
        "if advantage < 0, loss <= this x -advantage; 0 = unbounded",
        or_value(0, above(1)),
    ),
    kl_coef=Field(
        0.0,
        "weight of the KL from the reference model; 0 = there is no reference",
        at_least(0),
    ),
    kl_kind=Field(
        "k3",
        "estimator of the KL; in the loss 'k1' has no gradient on average, and only "
        "adds noise",
        one_of(("k1", "k2", "k3")),
    ),
    kl_cap=Field(
        0.0,
        "'k3': bound on one token's KL, beyond which it has no gradient; verl's is 10. "
        "0 = about e^20, at which a single token dominates the update",
        at_least(0),
    ),
    kl_place=Field("loss", "where the KL is added", one_of(("loss", "reward"))),
    kl_credit=Field(
        "group",
        "'grpo', 'rloo': a KL in the reward is compared within the 'group', or each "
        "'token' gets the KL from it on, as in OpenRLHF",
        one_of(("group", "token")),
    ),
    kl_controller=Field(
        "fixed",
        "'adaptive' adjusts kl_coef to bring the KL to kl_target",
        one_of(("fixed", "adaptive")),
    ),
    kl_target=Field(0.05, "'adaptive': nats per policy token", above(0)),
    kl_gain=Field(
        0.1,
        "'adaptive': share of the (clipped) error corrected per update",
        between(0, 1),
    ),
    loss_mean=Field(
        "token",
        "mean over all tokens, over each 'sequence' first, over each micro-batch first "
        "('micro_token'), or 'constant': sum / (rows x loss_tokens), as in Tunix and "
        "TRL; verl does not divide by rows: its lr applies to a sum that much larger. "
        "The value model's is over all tokens; with 'micro_token', over each row first",
        one_of(("token", "sequence", "constant", "micro_token")),
    ),
    loss_tokens=Field(
        0,
        "'constant': tokens per row; 0 = the most that a rollout's turns can hold",
        at_least(0),
    ),
    entropy_coef=Field(
        0.0, "weight of the entropy bonus, per token in nats", at_least(0)
    ),
    mask_retrieved=Field(True, "False: also learn from retrieved tokens (an ablation)"),
    mask_truncated=Field(
        False, "leave rollouts that ran out of a budget out of the loss"
    ),
    mask_equal_rewards=Field(
        False,
        "leave groups with equal rewards out of the loss: without a KL or entropy term "
        "they have no gradient, and need no pass",
    ),
    dynamic_sampling_rounds=Field(
        0,
        "rounds of further questions that replace those with equal rewards; groups "
        "still without spread are left out of the loss. 0 = learn from all groups",
        at_least(0),
    ),
    memorise_coef=Field(
        0.0, "weight (mu) of the memorised rows' log-likelihood; 0 = none", at_least(0)
    ),
    memorise_rows=Field(
        64, "rows of the set T that an update learns from, at most", at_least(1)
    ),
)

CRITIC = Section(
    "The value model of rl.algorithm 'ppo', initialised from the policy's weights.",
    lr=Field(1e-5, "peak learning rate", at_least(0)),
    warmup_steps=Field(0, "optimiser steps of linear warm-up", at_least(0)),
    max_grad_norm=Field(1.0, "global norm to which gradients are clipped", above(0)),
    value_clip=Field(
        0.5, "how far values may move from the old ones; 0 = no limit", at_least(0)
    ),
    pretrain_steps=Field(
        0, "RL steps at the start in which only the value model learns", at_least(0)
    ),
)

OPTIM = Section(
    "AdamW, in both SFT and RL.",
    b1=Field(0.9, "decay of the first moment", from_below(0, 1)),
    b2=Field(0.98, "decay of the second moment", from_below(0, 1)),
    eps=Field(1e-8, "added to the root of the second moment", above(0)),
    weight_decay=Field(0.01, "per step, times the learning rate", at_least(0)),
    max_grad_norm=Field(1.0, "global norm to which gradients are clipped", above(0)),
    moments_dtype=Field("float32", "dtype that stores both moments", one_of(DTYPES)),
)


def _role(name: str, meaning: str) -> Section:
    """Return the section of an auxiliary model, which gets chats and replies."""
    role = ROLES[name]
    source = "the URL of an OpenAI-compatible endpoint; '' = none"
    budgets = {}
    if not role.is_at_endpoint:
        source = (
            "directory, hub id, a world model such as 'world:judge', 'stage:<name>' = "
            f"the model that a stage of this run trained, or {source}"
        )
        budgets = dict(
            max_prompt_tokens=Field(
                1024, "a longer chat counts as a failed call", at_least(1)
            ),
            max_reply_tokens=Field(64, "replies are truncated to this", at_least(1)),
        )
    return Section(
        meaning,
        source=Field("", source),
        name=Field("", "name of the model at an endpoint"),
        max_concurrent=Field(
            16,
            "chats answered at a time",
            at_least(1),
            # Replies of the rewriter and the writer depend on the batch.
            may_change=name == "judge",
        ),
        **budgets,
        temperature=Field(
            0.0,
            "sampling temperature; 0 = greedy",
            or_value(0, at_least(MIN_TEMPERATURE)),
        ),
        top_p=Field(
            1.0, "smallest probability mass kept when sampling; 1 = all", up_to(0, 1)
        ),
        api_key_env=Field(
            "", "environment variable with the key; '' = none", may_change=True
        ),
        key_over_http=Field(
            False,
            "allow the key to be sent to another machine without encryption",
            may_change=True,
        ),
        timeout_seconds=Field(
            60.0, "timeout of one call to an endpoint", above(0), may_change=True
        ),
        max_retries=Field(
            4,
            "retries of a call before it counts as failed",
            at_least(0),
            may_change=True,
        ),
        may_change=role.is_only_evaluated,
    )


MODELS = Section(
    "The auxiliary models (all but the policy), by their roles.",
    judge=_role("judge", "The model that reward terms such as evidence_f1 call."),
    rewriter=_role("rewriter", "Rewrites retrieved facts as recalled ones."),
    writer=_role("writer", "Writes observations; '' = passages are shown as they are."),
    answerer=_role("answerer", "Words the final answer; '' = the policy's own words."),
    reader=_role("reader", "Reads the policy's evidence; see eval.methods."),
    eval_judge=_role("eval_judge", "Judges the answers in evaluations."),
    subject=_role("subject", "The model that methods ask in place of the policy."),
)

MESH = Section(
    "The mesh of devices; the product of the three axes is the number of devices.",
    may_change=True,
    data=Field(
        -1,
        "copies of the model that share the batch; -1 = all remaining devices",
        Bound(lambda x: x == -1 or x >= 1, "a number >= 1, or -1 for all remaining"),
    ),
    fsdp=Field(
        1, "shards of the weights, over which the batch is split too", at_least(1)
    ),
    tensor=Field(1, "shards of each matrix product", at_least(1)),
)

CHECKPOINT = Section(
    "When progress is saved.",
    may_change=True,
    sft_steps=Field(
        60, "SFT steps between saves; the last step is always saved", at_least(1)
    ),
    rl_steps=Field(
        2, "RL steps between saves; the last step is always saved", at_least(1)
    ),
    keep=Field(2, "newest checkpoints kept per stage", at_least(1)),
    grace_seconds=Field(
        25.0, "seconds to save in, after a signal to end the run", at_least(0.0)
    ),
    retry_seconds=Field(
        600.0, "seconds that writes to disk may fail before the run ends", at_least(0.0)
    ),
)


def _guard(meaning: str, bound: Bound = SHARE) -> Field:
    """Return the field of a bound on a metric, by default on a share."""
    return Field(None, meaning, or_value(None, bound), kind=float)


GUARDS = Section(
    "When a stage stops because its metrics have gone wrong; None = no bound.",
    may_change=True,
    max_skipped=Field(
        5,
        "updates skipped in a row for non-finite gradients, at which the stage stops",
        at_least(1),
    ),
    dumps=Field(3, "batches of such updates kept, in <stage>/skipped", at_least(0)),
    on_collapse=Field(
        "warn",
        "what to do when a metric is beyond one of these bounds: 'warn', 'stop', or "
        "'roll_back' to the newest checkpoint before that and continue with new draws",
        one_of(("warn", "stop", "roll_back")),
    ),
    max_roll_backs=Field(2, "roll-backs per stage before it stops", at_least(0)),
    patience=Field(3, "steps in a row beyond bounds before acting", at_least(1)),
    min_entropy=_guard("the policy's entropy, nats per token", at_least(0.0)),
    max_empty=_guard("share of rollouts with no answer or an empty one"),
    max_repeated=_guard("share of rollouts with the same turn twice"),
    max_kl=_guard("KL from the reference model, nats per token", at_least(0.0)),
    max_clipped=_guard("share of tokens whose ratio is clipped"),
    max_copied_queries=_guard("share of queries that repeat the question"),
    max_repeated_queries=_guard(
        "share of queries that repeat an earlier one of the same rollout"
    ),
    max_forged=_guard(
        "share of rollouts in which the policy wrote an observation's tag itself"
    ),
    max_unsupported=_guard(
        "share of the answers after searches that no retrieved passage contains"
    ),
    max_cut_observations=_guard("share of calls whose result was cut to its budget"),
    min_supporting_recall=_guard(
        "share of the supporting passages, if known, that rollouts retrieve"
    ),
    min_groups_with_spread=_guard("share of groups whose rewards are not all equal"),
)

EVAL = Section(
    "Evaluation on dev, which has no influence on training.",
    may_change=True,
    at_start=Field(True, "evaluate before the first stage too"),
    every_steps=Field(
        0,
        "RL steps between dev scores in metrics.jsonl; 0 = only after stages",
        at_least(0),
    ),
    methods=Field(
        ("protocol", "direct", "rag"),
        "methods evaluated after each stage: the policy's 'protocol', those of "
        "rsearch/methods/table.py, with settings as 'name:setting=value', or "
        "'package.module:name'; with models.reader also 'evidence', 'reader_direct' "
        "and 'reader_rag'",
        Bound(lambda x: 0 < len(x) == len(set(x)), "names, each once"),
    ),
    answer_tokens=Field(
        0,
        "tokens of a method's reply that only answers; 0 = rollout.max_turn_tokens",
        at_least(0),
    ),
    thought_tokens=Field(
        0,
        "tokens of a method's reply or step that reasons; 0 = rollout.max_turn_tokens",
        at_least(0),
    ),
    passage_tokens=Field(
        0,
        "tokens of a search's passages that a method shows in one prompt; 0 = "
        "rollout.max_observation_tokens",
        at_least(0),
    ),
    max_prompt_tokens=Field(
        0,
        "tokens of a method's prompt; a longer one counts as wrong; 0 = what a rollout "
        "may hold",
        at_least(0),
    ),
    answer_from=Field(
        "finish",
        "what models.answerer words: the text of 'finish', or the whole 'log'",
        one_of(("finish", "log")),
    ),
    scored_by=Field(
        "",
        "'policy': the policy scores texts for methods that ask models.subject, which "
        "gives no scores; '' = methods that need scores are refused",
        one_of(("", "policy")),
    ),
    judge_prompt=Field(
        "r1_searcher",
        "prompt of models.eval_judge: 'r1_searcher' takes True or False as the reply, "
        "'graded' 0, 0.5 or 1",
        one_of(("r1_searcher", "graded")),
    ),
    judge_golds=Field(
        "list",
        "'list' shows the judge all golden answers in one prompt; 'any' asks about "
        "each of them and takes the best score",
        one_of(("list", "any")),
    ),
    temperature=Field(
        0.0,
        "the policy's sampling temperature in all evaluations, also those between RL "
        "steps; 0 = greedy. models.subject has its own",
        or_value(0, at_least(MIN_TEMPERATURE)),
    ),
    top_p=Field(
        1.0, "smallest probability mass kept when sampling; 1 = all", up_to(0, 1)
    ),
    samples=Field(
        1,
        "rollouts per question with each seed; scores are means over all of them",
        at_least(1),
    ),
    seeds=Field(
        1,
        "number of sampling seeds: seed, seed + 1, ...; results have the standard "
        "deviation between them",
        between(1, 1000),
    ),
    drop_long=Field(
        False,
        "leave out questions whose prompts are longer than rollout.max_prompt_tokens; "
        "otherwise they count as wrong if the policy's protocol cannot ask them",
    ),
    max_questions=Field(0, "questions of dev; 0 = all", at_least(0)),
    draw_seed=Field(
        None,
        "draws the max_questions of dev at random; None = the first ones",
        or_value(None, at_least(0)),
        kind=int,
    ),
    normalize=Field("squad", "how answers are normalised", one_of(NORMALIZERS)),
    examples=Field(3, "transcripts printed at the end", at_least(0)),
)

LOG = Section(
    "What a run stores for people to read.",
    may_change=True,
    rollouts=Field(
        4,
        "groups stored from each RL step, the first ones, for rsearch.show and "
        "rsearch.replay; 0 = none",
        at_least(0),
    ),
    track=Field(
        (),
        "experiment trackers that also get metrics.jsonl's rows; each is an extra: pip "
        "install -e '.[wandb]'",
        some_of(TRACKERS, may_be_empty=True),
    ),
)

FIELDS = Section(
    "A run.",
    name=Field("base", "the recipe's name, in reports"),
    seed=Field(
        0,
        "seed of weights, data order, sampling and the world",
        between(0, 2**31 - 1),
    ),
    stages=Field(
        ("rl",),
        "stages in order: 'curate', 'sft', 'rl', or one of these and '_<name>'",
        Bound(
            lambda x: 0 < len(x) == len(set(x)) and all(map(is_stage, x)),
            "names, each once: 'rl' or 'rl_<word>', likewise 'sft' and 'curate'",
        ),
    ),
    overrides=Field(
        {}, "{stage: {section: {field: value}}} of the fields that differ in a stage"
    ),
    sets=Field(
        {},
        "{name: {section: {field: value}}} of the fields that differ when "
        "rsearch.evaluate --sets=name asks other questions: data.dev, and their index",
    ),
    trains=Field(
        "policy", "the model that a stage trains", one_of(("policy", "rewriter"))
    ),
    model=MODEL,
    tokenizer=TOKENIZER,
    protocol=PROTOCOL,
    data=DATA,
    world=WORLD,
    retrieval=RETRIEVAL,
    rollout=ROLLOUT,
    curate=CURATE,
    sft=SFT,
    rl=RL,
    critic=CRITIC,
    optim=OPTIM,
    # To use a function of your own:
    # c.reward.mentions = {"term": "my_rewards:mentions", "pattern": "x"}, called as
    # mentions(question, rollouts, pattern="x"); see rsearch/rewards/terms.py.
    reward=Field(
        {"answer_em": {"weight": 1.0}},
        "{term: its settings}; the reward is the weighted sum of the terms. A recipe "
        "replaces it; --config.reward.searched.weight=0.1 adds a term",
        Bound(lambda x: len(x) > 0, "at least one term with its settings"),
    ),
    models=MODELS,
    mesh=MESH,
    checkpoint=CHECKPOINT,
    guards=GUARDS,
    eval=EVAL,
    log=LOG,
    log_every=Field(
        1,
        "RL steps between printed lines; metrics.jsonl has every step",
        at_least(1),
        may_change=True,
    ),
)


def get_config() -> ConfigDict:
    """Return the defaults, locked: a recipe can set fields but not add any."""
    return FIELDS.config().lock()
