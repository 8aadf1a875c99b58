"""Every field of a configuration, with its default, meaning and unit.

The sizes are those of a small decoder on the embedded world. A recipe starts from
`get_config()` and sets only what differs; configs/quickstart.py is the first. What may
be written into a field, and what must divide what, is in `rsearch/config/rules.py`.

Sizes of text are counted in tokens, learning rates are per optimiser step, and 'rows'
are rollouts (RL) or demonstrations (SFT).
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def _model():
    """The network. With a source, its config.json gives the shape, not these fields."""
    c = ConfigDict()
    c.source = ""  # Hugging Face directory or hub id; "" = random weights, shape below
    c.num_layers = 4  # decoder blocks
    c.width = 128  # features of the residual stream
    c.num_heads = 4  # query heads
    c.num_kv_heads = 2  # key and value heads, shared by num_heads / num_kv_heads each
    c.head_dim = 32  # features of one head; even, for the rotation
    c.mlp_width = 384  # features inside the gated MLP
    c.vocab_size = 0  # rows of the embedding; 0 = as many as the tokenizer has
    c.rope_theta = 10_000.0  # base of the rotary wavelengths
    c.tie_embeddings = True  # one matrix embeds tokens and makes logits
    c.qkv_bias = False  # biases on query, key and value projections (qwen2: True)
    c.dtype = "float32"  # of the computation; master weights are always float32
    c.remat = False  # recompute activations in the backward pass: memory for time
    c.logit_chunk = 1024  # tokens whose logits exist at once in training
    # What rests in the memory of the hosts while it is not used: the weights that a
    # stage began with ("reference"), Adam's moments ("optimizer").
    c.offload = ()
    # LoRA: a stage trains adapters beside the weights it began with, which stay as they
    # are; when it has ended they are merged. 0 = it trains all weights.
    c.lora_rank = 0  # features between an adapter's two matrices (r)
    c.lora_alpha = 16.0  # an adapter's product is scaled by lora_alpha / lora_rank
    c.lora_matrices = ("q", "k", "v", "o", "gate", "up", "down")  # that have one
    return c


def _tokenizer():
    """Text <-> token ids."""
    c = ConfigDict()
    c.source = "world"  # directory or hub id; "" = model.source; "world" = embedded
    return c


def _protocol():
    """How policy and search engine talk."""
    c = ConfigDict()
    c.name = "search_r1"  # a key of PROTOCOLS, or your own, "package.module:name"
    # What a turn may call beside search, as <name> argument </name>: keys of TOOLS such
    # as "open", or your own, "package.module:name". The prompt must tell the policy.
    c.tools = ()
    c.max_queries = 0  # rag_r1_mq: of a turn that are searched; 0 = as its prompt says
    c.quotes_keep_commas = True  # rag_r1_mq: a comma in double quotes parts no queries
    c.json_ascii = False  # rag_r1_mq: results are escaped to ASCII
    c.instruction = placeholder(str)  # replaces the protocol's messages; {question}
    c.system = placeholder(str)  # replaces the protocol's system message
    c.invalid_message = placeholder(str)  # ... what a malformed turn is answered with
    c.direct = placeholder(str)  # replaces the messages of method "direct"; {question}
    c.rewrite = placeholder(str)  # ... of the rewriter; {document} and {question}
    c.rag = placeholder(str)  # ... and of "rag"; {passages} and {question}
    return c


def _data():
    """Questions."""
    c = ConfigDict()
    c.train = "world:train"  # file, hub id or "world:train"
    c.dev = "world:dev"  # held-out questions: file, hub id or "world:dev"
    c.fields_question = ""  # the record's question field; "" = as its format names it
    c.fields_answers = ""  # the record's golden answers; "" likewise
    c.fields_id = ""  # the record's id; "" likewise
    c.max_train = 0  # questions used of train, from its start; 0 = all
    c.max_dev = 0  # questions used of dev, from its start; 0 = all
    c.decontaminate = False  # leaves training questions out that dev asks, too
    c.on_bad = "raise"  # a bad record: "raise" names it, "skip" counts it
    return c


def _world():
    """The embedded synthetic world; made from config.seed where "world" is named."""
    c = ConfigDict()
    c.people = 400  # each with a birthplace, an employer and a year of birth
    c.films = 300  # each with a director and a year
    c.companies = 60  # each with a seat
    c.cities = 60  # each with a country
    c.train_questions = 1_400  # to learn from
    c.dev_questions = 200  # held out, about unseen heads
    c.kinds = ("single", "bridge", "three_hop", "four_hop")  # of questions
    c.kinds += ("comparison", "unanswerable")  # ... no passage answers the last
    c.known_share = 0.2  # of the entities are famous: pretraining teaches their facts
    c.missing_share = 0.15  # of the people lack a fact; where "unanswerable" is asked
    c.distractors = 100  # passages about near-homonyms, which no question is about
    return c


def _retrieval():
    """The corpus, its index and how it is asked."""
    c = ConfigDict()
    c.corpus = "world"  # JSONL of {"id", "contents"}; "" = the index's; "world"
    c.corpus_cache = ""  # directory for the corpus's offsets; "" = beside the corpus
    c.index = ""  # directory written by rsearch.index; the world needs none
    c.sharded = False  # several hosts: each holds its share of the index's parts
    c.timeout_seconds = 25.0  # ... in which all have answered, or a search has failed
    # "package.module:name" of a function of your own, (queries) -> for each the
    # passages, best first, or None where its search failed. "" = corpus and index.
    c.engine = ""
    c.url = ""  # of a retrieval service that is asked in place of an index
    # Its dialect: "search_r1", "r1_searcher", "rearag", or "serper" for the open web.
    c.api = "search_r1"
    c.fetch_pages = False  # "serper": passages are what the pages say, not snippets
    c.page_chars = 2000  # ... of a page that are kept
    c.api_key_env = ""  # environment variable with its key; "" = none
    c.max_retries = 3  # further calls after one that failed in a way that may pass
    c.outage_seconds = 300.0  # that it may be away before the run is saved and ends
    c.search_seconds = 1800.0  # any search that takes longer is stuck: the run ends so
    c.encoder = "hashed"  # "hashed" n-grams, or a directory or hub id of a BERT model
    c.family = "minilm"  # prefixes and pooling of the encoder: "minilm", "e5", "bge"
    c.max_query_tokens = 0  # of an encoded question, the rest is cut; 0 = the model's
    c.max_passage_tokens = 0  # likewise, of a passage, as the index was built
    c.top_k = 1  # passages for one query
    c.reranker = ""  # directory or hub id of a BERT cross-encoder; "" = none
    c.rerank_from = 10  # passages for one query that it puts in order
    c.cache_size = 10_000  # queries whose results are remembered; 0 = none
    c.hashed_dim = 512  # features of the hashed encoder's vectors
    # How config.writer is asked: by ReaRAG's code, or in the words of its paper's time.
    c.writing = "context_only"  # "context_only" or "unless_comparison"
    return c


def _rollout():
    """Sampling conversations: prompt, then turns and observations in alternation."""
    c = ConfigDict()
    c.group_size = 8  # rollouts of one question (G)
    c.max_searches = 2  # turns in which it may search or call a tool; one more follows
    c.forced_final_turn = True  # False: no turn follows the last search
    c.on_invalid = "message"  # malformed turn: a "message" where it has one, or "end"
    c.max_turn_tokens = 18  # tokens the policy may write in one turn
    c.max_observation_tokens = 22  # tokens of retrieved text for one query
    c.cut_tags = False  # the tags count as retrieved text, and the closing one is cut
    c.max_prompt_tokens = 16  # questions with longer prompts are left out and listed
    c.context_tokens = 0  # tokens of a whole rollout; 0 = what the above can come to
    c.temperature = 1.0  # of sampling in training; evaluation is greedy
    c.top_p = 1.0  # smallest probability mass kept when sampling; 1 = everything
    c.slots = 256  # rows decoded at once, in training and evaluation
    c.cache_tokens = 0  # that all slots hold together; 0 = slots x the longest rollout
    c.page_tokens = 128  # of a page of that cache, where cache_tokens is set
    c.together = False  # several hosts: one program over all devices; see BUILD.md
    c.extend_chunk = 32  # given tokens that a call of the model reads for each row
    return c


def _guards():
    """When a stage stops because its numbers have gone wrong; None = no bound."""
    c = ConfigDict()
    # Updates in a row that are left out, for a gradient that is not finite.
    c.max_skipped = 5
    c.dumps = 3  # batches of such updates that are kept, in <stage>/skipped
    # Where a measure is beyond a bound of these: "warn", "stop", or "roll_back" to the
    # newest checkpoint from before that, and go on with other draws.
    c.on_collapse = "warn"
    c.max_roll_backs = 2  # of a stage; it stops then
    c.patience = 3  # steps in a row that it is
    c.min_entropy = placeholder(float)  # of the policy, nats a token
    c.max_empty = placeholder(float)  # share of rollouts without an answer's text
    c.max_repeated = placeholder(float)  # ... with the same turn twice
    c.max_kl = placeholder(float)  # from the reference, nats a token
    c.max_clipped = placeholder(float)  # share of tokens whose ratio is clipped
    return c


def _curate():
    """Data stage: rolls out train's questions with the stage's model and keeps some."""
    c = ConfigDict()
    # A key of METHODS in rsearch/stages/curate/run.py, or "package.module:name".
    c.method = "segments"
    c.measure = "em"  # right is: "em" or "cover_em" of 1, or any "f1" above 0
    c.order = "any"  # of words in "cover_em": "any", "contiguous" or "substring"
    c.max_words = 0  # a longer answer is wrong, whatever the measure; 0 = no limit
    c.normalize = "squad"  # of answers: "squad" or "r1_searcher"
    c.rollouts = 1  # of a question at most; further ones only until enough is kept
    c.per_question = 1  # rollouts kept of a question at most
    c.max_kept = 0  # questions kept, drawn by config.seed; 0 = all
    c.first = ""  # "stage:<name>": its rollouts are the first; "answerable"
    c.retry_temperature = 1.2  # of the wrong ones' further rollouts; "answerable"
    c.retry_rollouts = 10  # ... how many at most, until one is right; 0 keeps them all
    c.retry_searches = 10  # ... turns of each in which it may search
    c.right_share = 0.25  # of the questions right at first that are kept; likewise
    c.easy_below = 10  # rollouts until right: fewer are easy; "difficulty"
    c.hard_above = 20  # ... more are hard, and those between medium
    c.keep_unsolved = True  # a question never right is hard; False leaves it out
    # "[dataset] difficulty number" each: "medium 200", "hotpotqa hard 2000", "easy 0.5"
    # for a share, "medium 200:350" for those after the first 200.
    c.mix = ("easy 0:", "medium 0:", "hard 0:")
    c.max_steps = 25  # Thought and Action pairs of a chain; "chains"
    c.max_retries = 20  # unusable steps of a chain that are sampled again, in all
    c.observations = "engine"  # found by the "engine", or in the "gold" passages
    return c


def _sft():
    """Supervised stage: cross-entropy on the policy's tokens of demonstrations."""
    c = ConfigDict()
    c.demonstrations = "world"  # JSONL of {"question", "turns"}; "world" = embedded
    c.steps = 360  # optimiser steps
    c.batch_size = 64  # demonstrations a step
    c.micro_batch = 64  # demonstrations a forward and backward pass
    c.sequence_tokens = 88  # tokens of a demonstration, padding included
    c.lr = 3e-3  # peak learning rate
    c.warmup_steps = 20  # steps of linear warm-up, the first of lr / warmup_steps
    c.decay = False  # fall linearly to a tenth of lr at the last step
    c.repeats = 2  # of each world question, each with its own flaw or none
    c.flawed_share = 0.72  # of the world's demonstrations do not find the answer
    c.guess_share = 0.12  # of the flawed guess at once; the others search only once
    c.baseline_share = 0.05  # further ones that answer as "direct" and "rag" do
    c.recall_share = 0.0  # of flawless ones about the famous recall what they know
    return c


def _rl():
    """Reinforcement stage. Sources of the formulas are in rsearch/learn."""
    c = ConfigDict()
    c.steps = 16  # each: roll out, reward, updates_per_step optimiser steps
    c.questions_per_step = 32  # groups a step
    c.updates_per_step = 1  # optimiser steps on one step's rollouts
    c.micro_batch = 128  # rows a forward and backward pass
    c.lr = 6e-4  # peak learning rate
    c.warmup_steps = 0  # optimiser steps of linear warm-up
    c.decay = False  # fall linearly to a tenth of lr at the last step
    # verl's schedule: warmup_steps are RL steps, and the first of them has a rate of 0.
    c.lr_first_step_zero = False
    # A rollout's reward compared with its group's ("grpo", "rloo"), with all of the
    # step's ("reinforce_pp"), with first the one and then the other
    # ("reinforce_pp_baseline"), or with what a value model expected ("ppo").
    c.algorithm = "grpo"
    c.advantage_mask = "policy"  # GAE, critic, whitening: "policy" or "response" tokens
    c.gamma = 1.0  # of "ppo": discount of a reward, per token
    c.gae_lambda = 1.0  # of "ppo": 1 = whole returns, 0 = one token and then the value
    c.normalize_std = True  # of "grpo": divide by the group's standard deviation
    c.std_eps = 1e-6  # ... and add this to that deviation
    c.std_ddof = 1  # ... which is the sample's (1) or the population's (0)
    c.behavior = "sampled"  # log-probs: as "sampled", or "scored" by the trainer
    c.tis_cap = 0.0  # weight scored / sampled probability, at most this; 0 = none
    c.ratio = "token"  # probability ratio of a "token", or of the "sequence" (GSPO)
    c.clip_low = 0.2  # the probability ratio is kept above 1 - clip_low
    c.clip_high = 0.2  # ... and below 1 + clip_high
    c.dual_clip = 0.0  # a bad token's loss is at most this x -advantage; 0 = unbounded
    c.kl_coef = 0.0  # weight of the divergence from the reference; 0 = no reference
    # Estimator of it. In the loss "k1" has no gradient on average: it only adds noise.
    c.kl_kind = "k3"  # "k1", "k2" or "k3"
    c.kl_place = "loss"  # where it acts: "loss" or "reward"
    c.kl_controller = "fixed"  # "adaptive" moves kl_coef towards kl_target
    c.kl_target = 0.05  # of "adaptive": nats per policy token
    c.kl_gain = 0.1  # ... share of its (clipped) error that an update corrects
    # Mean over all tokens, per "sequence" first, per micro-batch first ("micro_token"),
    # or "constant": a sum over rows x loss_tokens.
    c.loss_mean = "token"
    c.loss_tokens = 0  # of "constant"; 0 = what a rollout's turns can come to
    c.entropy_coef = 0.0  # weight of the entropy bonus, per token in nats
    c.mask_retrieved = True  # False: retrieved tokens are learnt too (an ablation)
    c.mask_truncated = False  # leave rollouts that a budget ended out of the loss
    # Rounds of further questions in place of those whose rollouts all earn the same;
    # what still has no spread then is left out of the loss. 0 = all are learnt from.
    c.refill_rounds = 0
    c.memorise_coef = 0.0  # weight (mu) of the memorised rows' log-likelihood; 0 = none
    c.memorise_rows = 64  # of the set T that an update learns from, at most
    return c


def _critic():
    """The value model of rl.algorithm "ppo", which starts from the policy's weights."""
    c = ConfigDict()
    c.lr = 1e-5  # peak learning rate
    c.warmup_steps = 0  # optimiser steps of linear warm-up
    c.max_grad_norm = 1.0  # global norm that gradients are scaled down to
    c.value_clip = 0.5  # values move at most this far from the old ones; 0 = freely
    c.pretrain_steps = 0  # RL steps at the start in which it alone learns
    return c


def _asked_model():
    """A model beside the policy that gets chats and replies."""
    c = ConfigDict()
    # Directory, hub id, "world:judge" and such, "stage:<name>" = what a stage of this
    # run trained, or the http(s) URL of an OpenAI-compatible endpoint; "" = none.
    c.source = ""
    c.name = ""  # of the model at an endpoint
    c.slots = 16  # chats answered at once
    c.max_prompt_tokens = 1024  # a longer chat counts as a failed call
    c.max_reply_tokens = 64  # replies are cut there
    c.temperature = 0.0  # of sampling; 0 = greedy
    c.top_p = 1.0  # smallest probability mass kept when sampling; 1 = everything
    c.api_key_env = ""  # environment variable with an endpoint's key; "" = none
    c.timeout_seconds = 60.0  # of one call of an endpoint
    c.max_retries = 4  # of a call that failed; then it counts as failed
    return c


def _optim():
    """AdamW, in both stages."""
    c = ConfigDict()
    c.b1 = 0.9  # decay of the first moment
    c.b2 = 0.98  # decay of the second moment
    c.eps = 1e-8  # added to the root of the second moment
    c.weight_decay = 0.01  # per step, times the learning rate
    c.max_grad_norm = 1.0  # global norm that gradients are scaled down to
    c.moments_dtype = "float32"  # as both moments rest: "float32" or "bfloat16"
    return c


def get_config():
    """The defaults, locked: a recipe can set fields and cannot invent them."""
    c = ConfigDict()
    c.name = "base"  # the recipe's name, in reports
    c.seed = 0  # of weights, data order, sampling and the world
    c.stages = ("rl",)  # in order; "curate", "sft", "rl", or such a word and "_<name>"
    c.overrides = ConfigDict()  # {stage: {section: {field: value}}}: what differs in it
    c.trains = "policy"  # whose weights a stage trains: the "policy" or "rewriter"
    c.model = _model()
    c.tokenizer = _tokenizer()
    c.protocol = _protocol()
    c.data = _data()
    c.world = _world()
    c.retrieval = _retrieval()
    c.rollout = _rollout()
    c.curate = _curate()
    c.sft = _sft()
    c.rl = _rl()
    c.critic = _critic()
    c.optim = _optim()
    # Term -> its settings; the reward is the weighted sum. A recipe replaces the whole;
    # --config.reward.searched.weight=0.1 adds a term. A function of your own:
    # c.reward.mentions = {"term": "my_rewards:mentions", "pattern": "x"}, called as
    # mentions(question, rollouts, pattern="x"); see rsearch/rewards/terms.py.
    c.reward = ConfigDict({"answer_em": {"weight": 1.0}})
    c.judge = _asked_model()  # that reward terms ask, such as evidence_f1
    c.rewriter = _asked_model()  # that words what was learnt from passages as recalled
    c.writer = _asked_model()  # that writes observations from passages; "" = they show
    c.answerer = _asked_model()  # that words the final answer; "" = as the policy did
    c.reader = _asked_model()  # that is given the policy's evidence; see eval.methods
    c.mesh = ConfigDict()  # devices; the product of the three is their number
    c.mesh.data = -1  # copies of the model that share the batch; -1 = all remaining
    c.mesh.fsdp = 1  # parts the weights are cut into; these share the batch too
    c.mesh.tensor = 1  # parts each matrix product is cut into
    c.checkpoint = ConfigDict()
    c.checkpoint.sft_steps = 60  # steps between two saves; the last is always saved
    c.checkpoint.rl_steps = 2  # likewise
    c.checkpoint.keep = 2  # newest checkpoints kept in a stage
    c.checkpoint.grace_seconds = 25.0  # for a save, once a signal says that it must end
    c.checkpoint.retry_seconds = 600.0  # that a disk may refuse, before the run ends
    c.guards = _guards()
    c.eval = ConfigDict()
    c.eval.at_start = True  # also before the first stage
    c.eval.every_steps = 0  # of RL, dev scores in metrics.jsonl; 0 = only after stages
    # Which, after each stage: of the policy "protocol", "direct" and "rag"; of
    # config.reader "evidence", "reader_direct" and "reader_rag".
    c.eval.methods = ("protocol", "direct", "rag")
    c.eval.answer_from = "finish"  # what config.answerer words: "finish", or the "log"
    c.eval.max_questions = 0  # of dev; 0 = all
    c.eval.normalize = "squad"  # of answers: "squad" or "r1_searcher"
    c.eval.examples = 3  # transcripts printed at the end
    c.log_every = 1  # RL steps between printed lines; metrics.jsonl has every step
    return c.lock()
