"""Every field of a configuration: default, meaning with unit, bound, may it change.

The sizes are those of a small decoder on the embedded world. A recipe starts from
`get_config()` and sets only what differs; configs/quickstart.py is the first. A field
marked `may_change` may differ when a run resumes. What must fit together, such as sizes
that divide each other, is in `rsearch/config/checks.py`.

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
    from_below,
    inside,
    matching,
    multiple_of,
    one_of,
    or_value,
    own_or,
    some_of,
    text_with,
    up_to,
)
from rsearch.config.stage_plan import ROLES, STAGE, is_stage

MIN_TEMPERATURE = 1e-6  # logits divided by less overflow
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")  # of a decoder block
NORMALIZERS = ("squad", "r1_searcher", "flashrag")
DTYPES = ("float32", "bfloat16")
TRACKERS = ("wandb", "trackio", "mlflow")
WORLD_KINDS = ("single", "bridge", "three_hop", "four_hop", "comparison")
WORLD_KINDS += ("unanswerable",)  # no passage answers these
CURATE_METHODS = ("segments", "whole", "answerable", "difficulty", "mix")
CURATE_METHODS += ("both_knowledge", "rewriter", "chains", "no_reasoning", "self_rag")
CURATE_METHODS += ("oracle",)
ALGORITHMS = ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo")
MIX = r"(\S+ )?(easy|medium|hard) (\d+(:\d*)?|0?\.\d+)"  # an entry of curate.mix

MODEL = Section(
    "The network. With a source, its config.json gives the shape, not these fields.",
    source=Field("", "Hugging Face directory or hub id; '' = random weights"),
    num_layers=Field(4, "decoder blocks", at_least(1)),
    width=Field(128, "features of the residual stream", at_least(1)),
    num_heads=Field(4, "query heads", at_least(1)),
    num_kv_heads=Field(2, "key and value heads; they divide num_heads", at_least(1)),
    head_dim=Field(
        32,
        "features of one head, even because pairs of them are rotated",
        multiple_of(2, "an even number >= 2"),
    ),
    mlp_width=Field(384, "features inside the gated MLP", at_least(1)),
    vocab_size=Field(0, "rows of the embedding; 0 = the tokenizer's ids", at_least(0)),
    rope_theta=Field(10_000.0, "base of the rotary wavelengths", above(0)),
    tie_embeddings=Field(True, "one matrix embeds tokens and makes logits"),
    qkv_bias=Field(False, "biases on query, key and value projections (qwen2: True)"),
    dtype=Field(
        "float32",
        "of the computation; master weights are always float32",
        one_of(DTYPES),
    ),
    remat=Field(
        False,
        "recompute activations in the backward pass: less memory, more time",
        may_change=True,
    ),
    logit_chunk=Field(
        1024,
        "tokens whose logits exist at once in training",
        at_least(1),
        may_change=True,
    ),
    offload=Field(
        (),
        "what rests in the hosts' memory while it is not used: the weights that a "
        "stage began with ('reference'), Adam's moments ('optimizer')",
        some_of(("reference", "optimizer"), may_be_empty=True),
        may_change=True,
    ),
    lora_rank=Field(
        0,
        "features between an adapter's two matrices (r): a stage trains adapters "
        "beside frozen weights and merges them at its end; 0 = it trains all weights",
        at_least(0),
    ),
    lora_alpha=Field(
        16.0, "an adapter's product is scaled by lora_alpha / lora_rank", above(0)
    ),
    lora_matrices=Field(MATRICES, "that have an adapter", some_of(MATRICES)),
)

TOKENIZER = Section(
    "Text to token ids and back.",
    source=Field(
        "world", "directory or hub id; '' = model.source; 'world' = the embedded one"
    ),
)

PROTOCOL = Section(
    "How the policy and its tools talk.",
    name=Field("search_r1", "a key of PROTOCOLS, or your own, 'package.module:name'"),
    tools=Field(
        (),
        "what a turn may call beside search, as <name> argument </name>: keys of TOOLS "
        "such as 'open', or your own, 'package.module:name'; the prompt must tell the "
        "policy about them",
    ),
    max_queries=Field(
        0,
        "rag_r1_mq: queries of a turn that are searched; 0 = as its prompt says",
        at_least(0),
    ),
    quotes_keep_commas=Field(
        True, "rag_r1_mq: a comma in double quotes does not separate queries"
    ),
    json_ascii=Field(False, "rag_r1_mq: results are escaped to ASCII"),
    instruction=Field(
        None,
        "replaces the protocol's messages; holds {question}",
        text_with("{question}"),
        kind=str,
    ),
    system=Field(None, "replaces the protocol's system message", kind=str),
    invalid_message=Field(
        None, "replaces the message that follows a malformed turn", kind=str
    ),
    direct=Field(
        None,
        "replaces the messages of method 'direct'; holds {question}",
        text_with("{question}"),
        kind=str,
    ),
    rewrite=Field(
        None,
        "replaces the messages to the rewriter; holds {document} and {question}",
        text_with("{document}", "{question}"),
        kind=str,
    ),
    rag=Field(
        None,
        "replaces the messages of method 'rag'; holds {passages} and {question}",
        text_with("{passages}", "{question}"),
        kind=str,
    ),
)

DATA = Section(
    "Questions.",
    train=Field("world:train", "questions to learn from: file, hub id or world:train"),
    dev=Field(
        "world:dev",
        "held-out questions: file, hub id, set:NAME or world:dev",
        may_change=True,
    ),
    fields_question=Field("", "a record's question field; '' = as its format says"),
    fields_answers=Field("", "a record's golden answers; '' = as its format says"),
    fields_id=Field("", "a record's id; '' = as its format says"),
    max_train=Field(0, "questions of train that are used; 0 = all", at_least(0)),
    max_dev=Field(
        0, "questions of dev that are used; 0 = all", at_least(0), may_change=True
    ),
    decontaminate=Field(False, "leave out training questions that dev asks, too"),
    on_bad=Field(
        "raise",
        "a bad record of questions, demonstrations or the corpus ends the run with its "
        "line ('raise') or is counted ('skip')",
        one_of(("raise", "skip")),
    ),
)

WORLD = Section(
    "The embedded synthetic world; made from config.seed where 'world' is named.",
    people=Field(
        400, "each with a birthplace, employer and year of birth", at_least(1)
    ),
    films=Field(300, "each with a director and a year", at_least(1)),
    companies=Field(60, "each with a seat", at_least(1)),
    cities=Field(60, "each with a country", at_least(1)),
    train_questions=Field(1_400, "to learn from", at_least(1)),
    dev_questions=Field(200, "held out, about unseen heads", at_least(1)),
    kinds=Field(WORLD_KINDS, "of questions", some_of(WORLD_KINDS)),
    known_share=Field(
        0.2, "of the entities whose facts pretraining teaches", between(0, 1)
    ),
    missing_share=Field(
        0.15,
        "of the people who lack a fact, where 'unanswerable' is among the kinds",
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
        "JSONL of {'id', 'contents'}; '' = the index's; 'world' = embedded; "
        "'paragraphs' = in an evaluation, those that come with each question",
    ),
    corpus_words=Field(
        0,
        "'paragraphs': words of a question's corpus, which others' paragraphs fill up; "
        "0 adds none",
        at_least(0),
    ),
    corpus_cache=Field(
        "",
        "directory for the corpus's offsets; '' = beside the corpus, or in the index "
        "where that alone names a corpus in another directory",
        may_change=True,
    ),
    index=Field(
        "",
        "directory written by rsearch.index; the world needs none; 'paragraphs' are "
        "searched by the encoder's vectors (''), or by 'bm25'",
        may_change=True,  # a run is bound to the fingerprint of what is in it
    ),
    bm25_index=Field(
        "",
        "directory written by rsearch.index --kind=bm25; its passages are merged with "
        "the index's by reciprocal rank; '' = none",
        may_change=True,  # as that of the index
    ),
    sharded=Field(
        False,
        "several hosts: each holds its share of the index's parts",
        may_change=True,
    ),
    on_devices=Field(
        False,
        "each host's accelerators hold the index's vectors, 2 bytes a dimension, and "
        "compare all of them: an exact search, whatever the index's kind",
        may_change=True,  # a run is bound to what it finds
    ),
    timeout_seconds=Field(
        25.0,
        "in which a service, or every host of a sharded index, must have answered",
        above(0),
        may_change=True,
    ),
    engine=Field(
        "",
        "'package.module:name' of your own function (queries) -> the passages of each, "
        "best first, or None where its search failed; '' = corpus and index",
        own_or(("",)),
    ),
    url=Field(
        "",
        "of a retrieval service that is asked in place of an index",
        may_change=True,  # a run is bound to its fingerprint
    ),
    api=Field(
        "search_r1",
        "the service's dialect; 'serper' searches the open web",
        one_of(("search_r1", "r1_searcher", "rearag", "serper")),
    ),
    fetch_pages=Field(False, "'serper': passages are what the pages say, not snippets"),
    page_chars=Field(2000, "of a fetched page that are used", at_least(1)),
    site=Field(
        "", "'serper': the only host searched, such as 'en.wikipedia.org'; '' = all"
    ),
    api_key_env=Field(
        "", "environment variable with the service's key; '' = none", may_change=True
    ),
    key_over_http=Field(
        False,
        "send the key to another machine without encryption, too",
        may_change=True,
    ),
    max_retries=Field(
        3,
        "further calls after one that failed in a way that may pass",
        at_least(0),
        may_change=True,
    ),
    outage_seconds=Field(
        300.0,
        "that the service, or a model at an endpoint, may be away before the run is "
        "saved and ends",
        at_least(0),
        may_change=True,
    ),
    search_seconds=Field(
        1800.0,
        "after which a search counts as stuck and the run ends",
        above(0),
        may_change=True,
    ),
    encoder=Field(
        "hashed", "'hashed' n-grams, or a directory or hub id of a BERT model"
    ),
    family=Field(
        "minilm",
        "prefixes and pooling of the encoder; 'declared' = as its directory says",
        one_of(("minilm", "e5", "bge", "declared")),
    ),
    max_query_tokens=Field(
        0, "a longer question is cut before encoding; 0 = the model's", at_least(0)
    ),
    max_passage_tokens=Field(
        0, "a longer passage was cut in the index; 0 = the model's", at_least(0)
    ),
    top_k=Field(1, "passages for one query", at_least(1)),
    reranker=Field("", "directory or hub id of a BERT cross-encoder; '' = none"),
    rerank_from=Field(10, "passages for one query that it puts in order", at_least(1)),
    cache_size=Field(
        10_000,
        "queries whose results are remembered; 0 = none",
        at_least(0),
        may_change=True,
    ),
    hashed_dim=Field(512, "features of the hashed encoder's vectors", at_least(1)),
    writer_prompt=Field(
        "context_only",
        "how models.writer is asked: for an answer, as ReaRAG's code does "
        "('context_only') or as its paper says ('unless_comparison'), or for a summary "
        "of the first passage that holds any, as R1-Searcher's online search is ("
        "'page_summary')",
        one_of(("context_only", "unless_comparison", "page_summary")),
    ),
)

ROLLOUT = Section(
    "Sampling conversations: prompt, then turns and observations in alternation.",
    group_size=Field(8, "rollouts of one question (G)", at_least(1)),
    max_searches=Field(
        2,
        "turns in which the policy may search or call a tool; one more turn follows",
        between(0, 98),
    ),
    forced_final_turn=Field(True, "False: no turn follows the last search"),
    on_invalid=Field(
        "message",
        "a malformed turn is followed by the protocol's 'message', or is the 'end'",
        one_of(("message", "end")),
    ),
    max_turn_tokens=Field(18, "tokens the policy may write in one turn", at_least(1)),
    max_observation_tokens=Field(
        22, "tokens of retrieved text for one query", at_least(1)
    ),
    max_written_tokens=Field(
        0,
        "tokens of an observation that models.writer wrote; 0 = max_observation_tokens",
        at_least(0),
    ),
    cut_tags=Field(
        False, "tags count as retrieved text, so that the cut takes the closing one"
    ),
    max_prompt_tokens=Field(
        16,
        "questions with longer prompts are left out and listed; of dev see "
        "eval.drop_long",
        at_least(1),
    ),
    context_tokens=Field(
        0,
        "tokens of a whole rollout, which ends where no further turn would fit; 0 = "
        "what its limits can come to",
        at_least(0),
    ),
    temperature=Field(
        1.0,
        "of sampling in training; eval.temperature is evaluation's",
        at_least(MIN_TEMPERATURE),
    ),
    top_p=Field(
        1.0, "smallest probability mass kept when sampling; 1 = all", up_to(0, 1)
    ),
    max_concurrent=Field(
        256,
        "rollouts decoded at once on a host, in training and evaluation; 0 = those of "
        "a step, or as many as the memory holds: see docs/memory.md",
        at_least(0),
        may_change=True,
    ),
    cache_tokens=Field(
        0,
        "that the KV cache holds in all; 0 = max_concurrent x the longest rollout",
        at_least(0),
        may_change=True,
    ),
    page_tokens=Field(
        128,
        "of a page of the KV cache, where cache_tokens is set",
        multiple_of(16, "a multiple of 16: whole tiles of an accelerator's memory"),
        may_change=True,
    ),
    devices=Field(
        0,
        "of the machine that roll out alone, with rl.max_staleness = 1; the others are "
        "the mesh. 0 = all learn and roll out",
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
        "a step of RL samples with the layers' matrices in 8 bits: half the bytes of "
        "bfloat16 to hold and to read; see docs/memory.md",
    ),
    extend_chunk=Field(
        32,
        "tokens of an observation that one call of the model reads for each row",
        at_least(1),
        may_change=True,
    ),
)

CURATE = Section(
    "Data stage: keep some of train's questions, by the model's rollouts of them.",
    method=Field(
        "segments",
        "a key of METHODS in rsearch/stages/curate/run.py, or your own",
        own_or(CURATE_METHODS),
    ),
    measure=Field(
        "em",
        "an answer is right with an 'em' or 'cover_em' of 1, or any 'f1' above 0",
        one_of(("em", "cover_em", "f1")),
    ),
    order=Field(
        "any",
        "of the words of an answer in 'cover_em', and in the passages of 'oracle'",
        one_of(("any", "contiguous", "substring")),
    ),
    max_words=Field(
        0,
        "an answer with more words is wrong, whatever measure; 0 = no limit",
        at_least(0),
    ),
    normalize=Field("squad", "of answers", one_of(NORMALIZERS)),
    rollouts=Field(
        1, "of a question at most; later ones only until enough are kept", at_least(1)
    ),
    per_question=Field(1, "rollouts kept of a question at most", at_least(1)),
    max_kept=Field(0, "questions kept, drawn by config.seed; 0 = all", at_least(0)),
    first=Field(
        "",
        "'stage:<name>' takes that stage's rollouts as the first",
        Bound(lambda x: x == "" or x.startswith(STAGE), "'' or 'stage:<name>'"),
    ),
    retry_temperature=Field(
        1.2,
        "'answerable': of further rollouts of questions that were wrong",
        at_least(MIN_TEMPERATURE),
    ),
    retry_rollouts=Field(
        10,
        "'answerable': at most so many more, until one is right; 0 keeps all questions",
        at_least(0),
    ),
    retry_searches=Field(
        10, "'answerable': turns of these in which they may search", at_least(0)
    ),
    right_share=Field(
        0.25,
        "'answerable': of the questions right at first that are kept",
        between(0, 1),
    ),
    easy_below=Field(
        10, "'difficulty', 'mix': rollouts until right; fewer are easy", at_least(1)
    ),
    hard_above=Field(
        20, "'difficulty', 'mix': more are hard, those between are medium", at_least(1)
    ),
    keep_unsolved=Field(
        True,
        "'difficulty', 'mix': a question never right is hard; False leaves it out",
    ),
    mix=Field(
        ("easy 0:", "medium 0:", "hard 0:"),
        "'difficulty', 'mix': '[dataset] difficulty number' each: 'medium 200', "
        "'hotpotqa hard 2000', 'easy 0.5' for a share, 'medium 200:350' for those "
        "after the first 200",
        matching(
            MIX,
            "texts such as 'medium 200', 'hotpotqa hard 2000', 'easy 0.5', "
            "'hard 10:20'",
        ),
    ),
    max_steps=Field(25, "'chains': Thought and Action pairs of a chain", at_least(1)),
    max_retries=Field(
        20, "'chains': unusable steps of a chain sampled again, in all", at_least(0)
    ),
    observations=Field(
        "engine",
        "'chains': come from the search 'engine', or from the 'gold' passages",
        one_of(("engine", "gold")),
    ),
    searches=Field(
        "gold",
        "'oracle': demonstrations search for each 'gold' passage, for the 'question' "
        "alone, or for nothing ('none'); the questions are the same",
        one_of(("gold", "question", "none")),
    ),
    recover_share=Field(
        0.25,
        "'oracle', 'gold' searches: of the questions kept; they first search with the "
        "question itself and miss a gold passage",
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
        "world", "JSONL of {'question', 'turns'}, or 'world' = the embedded ones"
    ),
    chats=Field(
        "",
        "JSONL of {'messages'}, general chats mixed in, of which the last reply is "
        "learnt; '' = none",
    ),
    chats_share=Field(
        0.5,
        "of what is imitated; chats are drawn by config.seed, and repeated where there "
        "are too few",
        inside(0, 1),
    ),
    steps=Field(360, "optimiser steps", at_least(0)),
    batch_size=Field(64, "demonstrations a step", at_least(1)),
    micro_batch=Field(
        64, "demonstrations a forward and backward pass", at_least(1), may_change=True
    ),
    sequence_tokens=Field(
        88, "tokens of a demonstration, padding included", at_least(2)
    ),
    lr=Field(3e-3, "peak learning rate", at_least(0)),
    warmup_steps=Field(
        20,
        "steps of linear warm-up, the first with a rate of lr / warmup_steps",
        at_least(0),
    ),
    decay=Field(False, "fall linearly to a tenth of lr at the last step"),
    loss_mean=Field(
        "token",
        "mean over all tokens of a step, or per 'sequence' first",
        one_of(("token", "sequence")),
    ),
    validation_share=Field(
        0.0,
        "of the demonstrations' questions, drawn by config.seed and not learnt from: "
        "their loss is in metrics.jsonl; 0 = none",
        Bound(lambda x: 0 <= x < 1, "a number >= 0 and < 1"),
    ),
    validate_every=Field(
        100, "steps between two validation losses; the last step has one", at_least(1)
    ),
    keep=Field(
        "last",
        "weights that the stage ends with: after its 'last' step, or of the "
        "'lowest_loss' on the validation questions",
        one_of(("last", "lowest_loss")),
    ),
    repeats=Field(
        2, "of each world question, each with its own flaw or none", at_least(1)
    ),
    flawed_share=Field(
        0.72, "of the world's demonstrations do not reach the answer", between(0, 1)
    ),
    guess_share=Field(
        0.12, "of the flawed guess at once; the others search only once", between(0, 1)
    ),
    baseline_share=Field(
        0.05, "further demonstrations that answer as 'direct' and 'rag'", between(0, 1)
    ),
    recall_share=Field(
        0.0, "of flawless ones about known entities recall the facts", between(0, 1)
    ),
)

RL = Section(
    "Reinforcement stage. Sources of the formulas are in rsearch/learn.",
    steps=Field(
        16, "each: roll out, reward, updates_per_step optimiser steps", at_least(0)
    ),
    questions_per_step=Field(32, "groups a step", at_least(1)),
    updates_per_step=Field(1, "optimiser steps on one step's rollouts", at_least(1)),
    max_staleness=Field(
        0,
        "1 = a step's rollouts are sampled while the step before learns, by the policy "
        "before that; see docs/one_step_ahead.md",
        between(0, 1),
    ),
    micro_batch=Field(
        128, "rows a forward and backward pass", at_least(1), may_change=True
    ),
    lr=Field(6e-4, "peak learning rate", at_least(0)),
    warmup_steps=Field(0, "optimiser steps of linear warm-up", at_least(0)),
    decay=Field(False, "fall linearly to a tenth of lr at the last step"),
    lr_first_step_zero=Field(
        False,
        "verl's schedule: warmup_steps are RL steps, and the first has a rate of 0",
    ),
    algorithm=Field(
        "grpo",
        "a rollout's reward is compared with its group's ('grpo', 'rloo'), with all of "
        "the step's ('reinforce_pp'), with first one and then the other "
        "('reinforce_pp_baseline'), or with a value model's estimate ('ppo')",
        one_of(ALGORITHMS),
    ),
    advantage_mask=Field(
        "policy",
        "tokens of GAE, critic and whitening: the policy's, or all of the 'response'",
        one_of(("policy", "response")),
    ),
    gamma=Field(1.0, "'ppo': discount of a reward, per token", between(0, 1)),
    gae_lambda=Field(
        1.0, "'ppo': 1 = whole returns, 0 = one token and then the value", between(0, 1)
    ),
    normalize_std=Field(True, "'grpo': divide by the group's standard deviation"),
    std_eps=Field(1e-6, "'grpo': is added to that deviation", above(0)),
    std_ddof=Field(
        1, "'grpo': deviation of a sample (1) or a population (0)", between(0, 1)
    ),
    old_logprobs=Field(
        "sampler",
        "the ratio's denominator: of the 'sampler', or 'recompute' by the trainer",
        one_of(("sampler", "recompute")),
    ),
    tis_cap=Field(
        0.0,
        "largest weight recomputed / sampled probability of a token; 0 = no weight",
        at_least(0),
    ),
    loss=Field(
        "",
        "'package.module:name' of your own loss of each token, a function like "
        "clipped_surrogate of rsearch/learn/losses.py; '' = that one",
        own_or(("",)),
    ),
    ratio=Field(
        "token",
        "probability ratio of a 'token', or of the 'sequence' (GSPO)",
        one_of(("token", "sequence")),
    ),
    clip_low=Field(0.2, "the ratio is kept above 1 - clip_low", inside(0, 1)),
    clip_high=Field(0.2, "the ratio is kept below 1 + clip_high", above(0)),
    dual_clip=Field(
        0.0,
        "if advantage < 0, loss <= this x -advantage; 0 = unbounded",
        or_value(0, above(1)),
    ),
    kl_coef=Field(
        0.0,
        "weight of the divergence from the reference; 0 = there is no reference",
        at_least(0),
    ),
    kl_kind=Field(
        "k3",
        "estimator of the divergence; in the loss 'k1' has no gradient on average and "
        "only adds noise",
        one_of(("k1", "k2", "k3")),
    ),
    kl_cap=Field(
        0.0,
        "'k3': most that one token counts, and beyond which it has no gradient; verl's "
        "is 10. 0 = e^20, of which one token is the update",
        at_least(0),
    ),
    kl_place=Field("loss", "where the divergence acts", one_of(("loss", "reward"))),
    kl_credit=Field(
        "group",
        "'grpo', 'rloo': a divergence in the reward is compared within the 'group', or "
        "each 'token' has that from it on, as OpenRLHF has it",
        one_of(("group", "token")),
    ),
    kl_controller=Field(
        "fixed",
        "'adaptive' moves kl_coef towards kl_target",
        one_of(("fixed", "adaptive")),
    ),
    kl_target=Field(0.05, "'adaptive': nats per policy token", above(0)),
    kl_gain=Field(
        0.1, "'adaptive': share of the (clipped) error corrected a step", between(0, 1)
    ),
    loss_mean=Field(
        "token",
        "mean over all tokens, per 'sequence' first, per micro-batch first "
        "('micro_token'), or 'constant': sum / (rows x loss_tokens), as in Tunix and "
        "TRL; verl does not divide by rows: its lr is of a sum that many times larger",
        one_of(("token", "sequence", "constant", "micro_token")),
    ),
    loss_tokens=Field(
        0, "'constant': tokens a row; 0 = what a rollout's turns can be", at_least(0)
    ),
    entropy_coef=Field(
        0.0, "weight of the entropy bonus, per token in nats", at_least(0)
    ),
    mask_retrieved=Field(True, "False: retrieved tokens are learnt too (an ablation)"),
    mask_truncated=Field(False, "leave rollouts that a budget ended out of the loss"),
    mask_equal_rewards=Field(
        False,
        "leave groups out of the loss whose rollouts all earn the same: without a "
        "divergence or an entropy term they have no gradient, and need no pass",
    ),
    dynamic_sampling_rounds=Field(
        0,
        "rounds of further questions in place of those whose rollouts all earn the "
        "same; those without spread are then left out of the loss. 0 = all are learnt",
        at_least(0),
    ),
    memorise_coef=Field(
        0.0, "weight (mu) of the memorised rows' log-likelihood; 0 = none", at_least(0)
    ),
    memorise_rows=Field(
        64, "of the set T that an update learns from, at most", at_least(1)
    ),
)

CRITIC = Section(
    "The value model of rl.algorithm 'ppo', which starts from the policy's weights.",
    lr=Field(1e-5, "peak learning rate", at_least(0)),
    warmup_steps=Field(0, "optimiser steps of linear warm-up", at_least(0)),
    max_grad_norm=Field(1.0, "global norm gradients are scaled down to", above(0)),
    value_clip=Field(
        0.5, "values move at most this far from the old ones; 0 = freely", at_least(0)
    ),
    pretrain_steps=Field(
        0, "RL steps at the start in which it alone learns", at_least(0)
    ),
)

OPTIM = Section(
    "AdamW, in both stages.",
    b1=Field(0.9, "decay of the first moment", from_below(0, 1)),
    b2=Field(0.98, "decay of the second moment", from_below(0, 1)),
    eps=Field(1e-8, "is added to the root of the second moment", above(0)),
    weight_decay=Field(0.01, "per step, times the learning rate", at_least(0)),
    max_grad_norm=Field(1.0, "global norm gradients are scaled down to", above(0)),
    moments_dtype=Field("float32", "in which both moments rest", one_of(DTYPES)),
)


def _role(name: str, meaning: str) -> Section:
    """Return the section of a model beside the policy that gets chats and replies."""
    role = ROLES[name]
    source = "the URL of an OpenAI-compatible endpoint; '' = none"
    budgets = {}
    if not role.is_at_endpoint:
        source = (
            "directory, hub id, 'world:judge' and such, 'stage:<name>' = what a stage "
            f"of this run trained, or {source}"
        )
        budgets = dict(
            max_prompt_tokens=Field(
                1024, "a longer chat counts as a failed call", at_least(1)
            ),
            max_reply_tokens=Field(64, "replies are cut there", at_least(1)),
        )
    return Section(
        meaning,
        source=Field("", source),
        name=Field("", "of the model at an endpoint"),
        max_concurrent=Field(
            16,
            "chats answered at once",
            at_least(1),
            # Replies of the rewriter and the writer depend on the batch.
            may_change=name == "judge",
        ),
        **budgets,
        temperature=Field(
            0.0, "of sampling; 0 = greedy", or_value(0, at_least(MIN_TEMPERATURE))
        ),
        top_p=Field(
            1.0, "smallest probability mass kept when sampling; 1 = all", up_to(0, 1)
        ),
        api_key_env=Field("", "environment variable with the key; '' = none"),
        key_over_http=Field(
            False, "send the key to another machine without encryption, too"
        ),
        timeout_seconds=Field(60.0, "of one call of an endpoint", above(0)),
        max_retries=Field(
            4, "of a call that failed; then it counts as failed", at_least(0)
        ),
        may_change=role.is_only_evaluated,
    )


MODELS = Section(
    "The models beside the policy, by their roles.",
    judge=_role("judge", "Reward terms such as evidence_f1 ask it."),
    rewriter=_role("rewriter", "It rewrites retrieved facts as recalled ones."),
    writer=_role("writer", "It writes observations; '' = passages are shown."),
    answerer=_role("answerer", "It words the final answer; '' = as the policy did."),
    reader=_role("reader", "It reads the policy's evidence; see eval.methods."),
    eval_judge=_role("eval_judge", "It judges the answers of the evaluations."),
    subject=_role("subject", "Methods ask it in place of the policy."),
)

MESH = Section(
    "The devices; the product of the three is their number.",
    may_change=True,
    data=Field(
        -1,
        "copies of the model that share the batch; -1 = all remaining devices",
        Bound(lambda x: x == -1 or x >= 1, "a number >= 1, or -1 for all remaining"),
    ),
    fsdp=Field(
        1, "shards of the weights, between which the batch is split too", at_least(1)
    ),
    tensor=Field(1, "shards of each matrix product", at_least(1)),
)

CHECKPOINT = Section(
    "When progress is saved.",
    may_change=True,
    sft_steps=Field(60, "between two saves; the last is always saved", at_least(1)),
    rl_steps=Field(2, "between two saves; the last is always saved", at_least(1)),
    keep=Field(2, "newest checkpoints kept in a stage", at_least(1)),
    grace_seconds=Field(
        25.0, "for a save, once a signal says that the run must end", at_least(0.0)
    ),
    retry_seconds=Field(
        600.0, "that a disk may refuse before the run ends", at_least(0.0)
    ),
)


def _share(meaning: str) -> Field:
    """Return the field of a bound on a share."""
    return Field(None, meaning, or_value(None, between(0, 1)), kind=float)


GUARDS = Section(
    "When a stage stops because its numbers have gone wrong; None = no bound.",
    may_change=True,
    max_skipped=Field(
        5, "updates in a row left out because a gradient is not finite", at_least(1)
    ),
    dumps=Field(3, "batches of such updates kept, in <stage>/skipped", at_least(0)),
    on_collapse=Field(
        "warn",
        "where a measure is beyond a bound of these: 'warn', 'stop', or 'roll_back' to "
        "the newest checkpoint from before that, and go on with other draws",
        one_of(("warn", "stop", "roll_back")),
    ),
    max_roll_backs=Field(2, "of a stage; it stops then", at_least(0)),
    patience=Field(3, "steps in a row beyond bounds before acting", at_least(1)),
    min_entropy=Field(
        None, "of the policy, nats a token", or_value(None, at_least(0.0)), kind=float
    ),
    max_empty=_share("share of rollouts without an answer's text"),
    max_repeated=_share("share of rollouts with the same turn twice"),
    max_kl=Field(
        None,
        "from the reference, nats a token",
        or_value(None, at_least(0.0)),
        kind=float,
    ),
    max_clipped=_share("share of tokens whose ratio is clipped"),
    max_copied_queries=_share("share of queries that are the question"),
    max_repeated_queries=_share(
        "share of queries that were made before in the same rollout"
    ),
    max_forged=_share(
        "share of rollouts with an observation's tag that the policy wrote"
    ),
    max_unsupported=_share(
        "share of answers after searches that are in no passage found"
    ),
    min_supporting_recall=_share(
        "share of the supporting passages that rollouts find, where they are known"
    ),
)

EVAL = Section(
    "What is measured on dev; training does not look at it.",
    may_change=True,
    at_start=Field(True, "also before the first stage"),
    every_steps=Field(
        0,
        "RL steps between dev scores in metrics.jsonl; 0 = only after stages",
        at_least(0),
    ),
    methods=Field(
        ("protocol", "direct", "rag"),
        "after each stage: the policy's 'protocol' and the methods of "
        "rsearch/methods/table.py, 'name:setting=value' with settings, or "
        "'package.module:name'; with models.reader also 'evidence', 'reader_direct' "
        "and 'reader_rag'",
        Bound(lambda x: 0 < len(x) == len(set(x)), "names, each once"),
    ),
    answer_tokens=Field(
        0,
        "of a method's reply that is an answer alone; 0 = rollout.max_turn_tokens",
        at_least(0),
    ),
    thought_tokens=Field(
        0,
        "of a method's reply, or step, that reasons; 0 = rollout.max_turn_tokens",
        at_least(0),
    ),
    passage_tokens=Field(
        0,
        "of retrieved text that a method shows at once; 0 = "
        "rollout.max_observation_tokens",
        at_least(0),
    ),
    max_prompt_tokens=Field(
        0,
        "of a method: a longer prompt counts as wrong; 0 = what a rollout may hold",
        at_least(0),
    ),
    answer_from=Field(
        "finish",
        "what models.answerer words: the text of 'finish', or the whole 'log'",
        one_of(("finish", "log")),
    ),
    scored_by=Field(
        "",
        "'policy': its model scores texts for the methods that ask models.subject, "
        "which scores none; '' = such a method is refused",
        one_of(("", "policy")),
    ),
    judge_prompt=Field(
        "r1_searcher",
        "of models.eval_judge: 'r1_searcher' takes True or False; 'graded' 0, 0.5 or 1",
        one_of(("r1_searcher", "graded")),
    ),
    judge_golds=Field(
        "list",
        "'list' shows the judge all golden answers at once; 'any' asks for each of "
        "them and takes the best score",
        one_of(("list", "any")),
    ),
    temperature=Field(
        0.0,
        "of the policy's sampling in all evaluations, those between RL steps too; "
        "0 = greedy. models.subject has its own",
        or_value(0, at_least(MIN_TEMPERATURE)),
    ),
    top_p=Field(
        1.0, "smallest probability mass kept when sampling; 1 = all", up_to(0, 1)
    ),
    samples=Field(
        1,
        "rollouts of a question with each seed; its scores are means over all of them",
        at_least(1),
    ),
    seeds=Field(
        1,
        "of sampling: seed, seed + 1, ...; rows have the deviation between them",
        between(1, 1000),
    ),
    drop_long=Field(
        False,
        "leave questions out whose prompts are longer than rollout.max_prompt_tokens; "
        "else they are wrong where the policy's protocol cannot ask them",
    ),
    max_questions=Field(0, "of dev; 0 = all", at_least(0)),
    normalize=Field("squad", "of answers", one_of(NORMALIZERS)),
    examples=Field(3, "transcripts printed at the end", at_least(0)),
)

LOG = Section(
    "What a run stores for people to look at.",
    may_change=True,
    rollouts=Field(
        4,
        "groups of each RL step, its first ones, for rsearch.show and rsearch.replay; "
        "0 = none",
        at_least(0),
    ),
    track=Field(
        (),
        "experiment trackers that get metrics.jsonl's rows, too; each is an extra: pip "
        "install -e '.[wandb]'",
        some_of(TRACKERS, may_be_empty=True),
    ),
)

FIELDS = Section(
    "A run.",
    name=Field("base", "the recipe's name, in reports"),
    seed=Field(
        0, "of weights, data order, sampling and the world", between(0, 2**31 - 1)
    ),
    stages=Field(
        ("rl",),
        "in order; 'curate', 'sft', 'rl', or such a word and '_<name>'",
        Bound(
            lambda x: 0 < len(x) == len(set(x)) and all(map(is_stage, x)),
            "names, each once: 'rl' or 'rl_<word>', likewise 'sft' and 'curate'",
        ),
    ),
    overrides=Field(
        {}, "{stage: {section: {field: value}}} of what differs in a stage"
    ),
    sets=Field(
        {},
        "{name: {section: {field: value}}} of what differs where rsearch.evaluate "
        "--sets=name asks other questions: data.dev, and the index that they need",
    ),
    trains=Field(
        "policy", "whose weights a stage trains", one_of(("policy", "rewriter"))
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
    # A function of your own:
    # c.reward.mentions = {"term": "my_rewards:mentions", "pattern": "x"}, called as
    # mentions(question, rollouts, pattern="x"); see rsearch/rewards/terms.py.
    reward=Field(
        {"answer_em": {"weight": 1.0}},
        "{term: its settings}; the reward is their weighted sum. A recipe replaces it; "
        "--config.reward.searched.weight=0.1 adds a term",
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
    """Return the defaults, locked: a recipe can set fields and cannot invent them."""
    return FIELDS.config().lock()
