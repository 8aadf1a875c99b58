"""Check a configuration: the bound of each field, and fields that must fit together.

`validate` runs before anything compiles. The bounds are in configs/base.py; the
functions here refuse fields that conflict, and show the arithmetic. A value of the
wrong type is refused when it is set, see `config.fields`. Names of protocols, tools and
the like are looked up by `setup.checks`, and settings of reward terms are checked by
`rewards.group`, since this package must not import those.
"""

import math
import re

from ml_collections import ConfigDict

from rsearch.config.fields import apply_overrides, fields
from rsearch.config.spec import base_fields
from rsearch.config.stage_plan import (
    PARAGRAPHS,
    ROLES,
    URLS,
    WORLD,
    kinds,
    stage_configs,
)

MOST_BFLOAT16_DECAY = 0.996  # 1 - 2^-8; 2^-8 is half of a bfloat16's last bit
HOST = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+")  # a web site's host name


def _check_sources(c):
    if not c.tokenizer.source and not c.model.source:
        raise ValueError(
            "config.tokenizer.source and config.model.source are both empty: name a "
            "tokenizer ('world' is the embedded one)"
        )
    if c.model.source and c.tokenizer.source == WORLD:
        raise ValueError(
            f"config.tokenizer.source = 'world' does not belong to "
            f"config.model.source = {c.model.source!r}; '' is the model's own tokenizer"
        )
    question_sources = {"data.train": c.data.train, "data.dev": c.data.dev}
    if "sft" in kinds(c):
        question_sources["sft.demonstrations"] = c.sft.demonstrations
    for name, value in question_sources.items():
        is_asked = value.partition(":")[0] == WORLD
        if is_asked and c.retrieval.corpus not in (WORLD, PARAGRAPHS):
            raise ValueError(
                f"config.{name} = {value!r} asks about a world that "
                f"config.retrieval.corpus = {c.retrieval.corpus!r} does not hold"
            )


def _check_search(c):
    r = c.retrieval
    if r.index and r.corpus == WORLD:
        raise ValueError(
            f"config.retrieval.index = {r.index!r} is not an index of "
            "config.retrieval.corpus = 'world'; corpus = '' is the index's own corpus"
        )
    if r.fetch_pages and not (r.url and r.api == "serper"):
        raise ValueError(
            "config.retrieval.fetch_pages = True reads the pages that a web search "
            f"finds: api = {r.api!r}, url = {r.url!r} is no web search"
        )
    if r.site and not (r.url and r.api == "serper" and HOST.fullmatch(r.site)):
        raise ValueError(
            f"config.retrieval.site = {r.site!r}: must be a host name, and only for a "
            f"web search: api = {r.api!r}, url = {r.url!r}"
        )
    for name, other in (("engine", "url"), ("engine", "index"), ("url", "index")):
        if r[name] and r[other]:
            raise ValueError(
                f"config.retrieval.{name} = {r[name]!r} and config.retrieval.{other} = "
                f"{r[other]!r}: set only one of them"
            )
    purposes = {
        "bm25_index": "is merged with an index of vectors",
        "sharded": "distributes an index's parts over hosts",
        "on_devices": "puts the vectors of an index on the accelerators",
    }
    for name, purpose in purposes.items():
        if r[name] and not r.index:
            raise ValueError(
                f"config.retrieval.{name} = {r[name]!r} {purpose}: "
                "config.retrieval.index = '' names none"
            )
    if r.on_devices and r.sharded:
        raise ValueError(
            "config.retrieval.on_devices = True and config.retrieval.sharded = True: "
            "with on_devices each host holds the complete index; set only one of them"
        )
    if r.url and r.search_seconds <= r.outage_seconds + r.timeout_seconds:
        raise ValueError(
            f"config.retrieval.search_seconds = {r.search_seconds} ends too soon for "
            f"its service to be unreachable for outage_seconds = {r.outage_seconds}, "
            f"and then answer in timeout_seconds = {r.timeout_seconds}"
        )
    if r.reranker and r.rerank_from < r.top_k:
        raise ValueError(
            f"config.retrieval.rerank_from = {r.rerank_from} passages are ordered by "
            f"config.retrieval.reranker, fewer than the top_k = {r.top_k} to be kept"
        )


def _check_paragraphs(c):
    """Refuse settings that do not apply to a search of each question's paragraphs."""
    r = c.retrieval
    if r.corpus != PARAGRAPHS:
        if r.corpus_words:
            raise ValueError(
                f"config.retrieval.corpus_words = {r.corpus_words} applies only to "
                "config.retrieval.corpus = 'paragraphs', but the corpus is "
                f"{r.corpus!r}"
            )
        return
    required_values = {
        "engine": "",
        "url": "",
        "bm25_index": "",
        "sharded": False,
        "on_devices": False,
    }
    for name, required in required_values.items():
        if r[name] != required:
            raise ValueError(
                f"config.retrieval.{name} = {r[name]!r} is not used by "
                f"config.retrieval.corpus = 'paragraphs': must be {required!r}"
            )
    if r.index not in ("", "bm25"):
        raise ValueError(
            f"config.retrieval.index = {r.index!r}: config.retrieval.corpus = "
            "'paragraphs' builds indexes in memory: must be '' (vectors) or 'bm25'"
        )
    if c.protocol.tools:
        raise ValueError(
            f"config.protocol.tools = {c.protocol.tools}: with config.retrieval.corpus "
            "= 'paragraphs' a policy can only search: must be ()"
        )


def _check_models(c):
    for name in ROLES:
        source = c.models[name].source
        if not source.startswith(URLS):
            continue
        if any(sign in source for sign in "@?#"):  # not shown, as it may be a secret
            raise ValueError(
                f"config.models.{name}.source is a URL that holds a password, a query "
                "or a fragment; a key is read from the environment variable that "
                f"config.models.{name}.api_key_env names"
            )
        if not c.models[name].name:
            raise ValueError(
                f"config.models.{name}.name = '': config.models.{name}.source is an "
                "endpoint, which may serve several models: name the model"
            )
    source = c.models.subject.source
    if c.eval.scored_by and not source:
        raise ValueError(
            f"config.eval.scored_by = {c.eval.scored_by!r} has no effect: the policy "
            "answers, since config.models.subject.source = ''"
        )
    if source and not source.startswith(URLS):
        raise ValueError(
            f"config.models.subject.source = {source!r}: must be the http(s):// URL of "
            "an OpenAI-compatible endpoint"
        )
    methods = [m for m in c.eval.methods if m == "evidence" or m.startswith("reader_")]
    if methods and not c.models.reader.source:
        raise ValueError(
            f"config.eval.methods names {methods[0]!r}, which needs a reader: name one "
            "in config.models.reader.source"
        )


def _check_sampling(c):
    """Refuse to repeat evaluations whose samples would all be the same."""
    e, subject = c.eval, c.models.subject
    if e.temperature == 0 and e.top_p < 1:
        raise ValueError(
            f"config.eval.top_p = {e.top_p} has no effect: config.eval.temperature = 0 "
            "takes the likeliest token; a higher temperature samples"
        )
    if e.samples * e.seeds == 1:
        return
    counts = f"config.eval.samples = {e.samples} and config.eval.seeds = {e.seeds}"
    for method in e.methods:
        if method.startswith("reader_"):
            raise ValueError(
                f"{counts} repeat the policy's rollouts, but config.eval.methods names "
                f"{method!r}, which has none: leave it out"
            )
        asks_subject = subject.source and method not in ("protocol", "evidence")
        field = "models.subject.temperature" if asks_subject else "eval.temperature"
        if c[field] == 0:
            raise ValueError(
                f"{counts} would repeat the same rollouts of {method!r}: "
                f"config.{field} = 0 takes the likeliest token; a higher temperature "
                "samples"
            )


def _check_multiple(c, name, unit, reason=""):
    """Refuse a field that is not a multiple of another one."""
    if c[name] % c[unit]:
        raise ValueError(
            f"config.{name} = {c[name]} is not a multiple of config.{unit} = "
            f"{c[unit]}{reason}"
        )


def _check_shape(c):
    if not c.model.source:
        _check_multiple(c, "model.num_heads", "model.num_kv_heads")
        _check_multiple(c, "model.num_kv_heads", "mesh.tensor")


def _check_global_mesh(c):
    if not c.rollout.global_mesh:
        return
    for name in ROLES:
        source = c.models[name].source
        if source and not source.startswith(URLS):
            raise ValueError(
                f"config.models.{name}.source = {source!r} would run on one host's "
                "devices, but config.rollout.global_mesh = True is for models that do "
                "not fit there: name an endpoint"
            )


def _check_rl_batch(c):
    """Refuse numbers of rollouts that do not divide into groups or micro-batches."""
    if "rl" not in kinds(c):
        return
    ungrouped_algorithms = ("ppo", "reinforce_pp")
    masks = c.rl.mask_equal_rewards or c.rl.dynamic_sampling_rounds
    needs_group = c.rl.algorithm not in ungrouped_algorithms or masks
    if c.rollout.group_size < 2 and needs_group:
        raise ValueError(
            f"config.rollout.group_size = {c.rollout.group_size}: must be >= 2, since "
            "a rollout's reward is compared with those of its group; "
            f"config.rl.algorithm = {ungrouped_algorithms[0]!r} or "
            f"{ungrouped_algorithms[1]!r} without config.rl.dynamic_sampling_rounds "
            "and config.rl.mask_equal_rewards needs no group"
        )
    rows = c.rl.questions_per_step * c.rollout.group_size
    divisor = c.rl.updates_per_step * c.rl.micro_batch
    if rows % divisor:
        update_rows, remainder = divmod(rows, c.rl.updates_per_step)
        sizes = range(1, min(update_rows, c.rl.micro_batch) + 1)
        divisors = [n for n in sizes if not remainder and update_rows % n == 0]
        largest = max(divisors, default=0)
        raise ValueError(
            f"config.rl.micro_batch = {c.rl.micro_batch} does not fit: "
            f"{c.rl.questions_per_step} questions x {c.rollout.group_size} rollouts = "
            f"{rows} rows, which {c.rl.updates_per_step} updates x micro-batches of "
            f"{c.rl.micro_batch} = {divisor} rows do not divide (remainder "
            f"{rows % divisor})" + (f"; {largest} does" if largest else "")
        )
    reason = ": all rollouts of a question belong to one update"
    _check_multiple(c, "rl.questions_per_step", "rl.updates_per_step", reason)
    if c.data.max_train and c.data.max_train < c.rl.questions_per_step:
        raise ValueError(
            f"config.data.max_train = {c.data.max_train} is below "
            f"config.rl.questions_per_step = {c.rl.questions_per_step}"
        )
    # At first, only a critic may learn.
    num_pretrain = c.critic.pretrain_steps if c.rl.algorithm == "ppo" else 0
    steps = max(c.rl.steps - num_pretrain, 0)
    total = steps * c.rl.updates_per_step
    warmup_unit = c.rl.updates_per_step if c.rl.lr_first_step_zero else 1
    if c.rl.decay and c.rl.warmup_steps * warmup_unit >= total:
        raise ValueError(
            f"config.rl.warmup_steps = {c.rl.warmup_steps} leaves no room for a decay "
            f"in {steps} steps x {c.rl.updates_per_step} updates = {total} optimiser "
            "steps"
        )


def _check_rl_settings(c):
    """Refuse RL settings that need, or conflict with, another setting."""
    if "rl" not in kinds(c):
        return
    is_sampled = c.rl.old_logprobs == "sampler"
    if is_sampled and c.rollout.top_p < 1:
        raise ValueError(
            f"config.rollout.top_p = {c.rollout.top_p} needs config.rl.old_logprobs = "
            "'recompute': the sampler's log-probabilities are within the nucleus, the "
            "trainer's over the whole vocabulary, so they cannot be compared"
        )
    if is_sampled and not c.rl.mask_retrieved:
        raise ValueError(
            "config.rl.mask_retrieved = False needs config.rl.old_logprobs = "
            "'recompute': retrieved tokens were not sampled and have no log-probability"
        )
    if c.rl.tis_cap and not c.rl.mask_retrieved:
        raise ValueError(
            f"config.rl.mask_retrieved = False does not go with config.rl.tis_cap = "
            f"{c.rl.tis_cap}: retrieved tokens have no probability from the sampler"
        )
    if c.guards.max_kl is not None and not c.rl.kl_coef:
        raise ValueError(
            f"config.guards.max_kl = {c.guards.max_kl}: with config.rl.kl_coef = 0 no "
            "KL is measured"
        )
    for name, unset in (("dual_clip", 0), ("ratio", "token")):
        if c.rl.loss and c.rl[name] != unset:
            raise ValueError(
                f"config.rl.{name} = {c.rl[name]!r} applies only to the clipped "
                f"surrogate, which config.rl.loss = {c.rl.loss!r} replaces: must be "
                f"{unset!r}"
            )
    if c.rl.tis_cap and c.rl.old_logprobs != "recompute":
        raise ValueError(
            f"config.rl.tis_cap = {c.rl.tis_cap} needs config.rl.old_logprobs = "
            "'recompute': the weight is the trainer's probability over the sampler's"
        )
    if c.rl.kl_controller == "adaptive" and not c.rl.kl_coef:
        raise ValueError(
            "config.rl.kl_controller = 'adaptive' needs config.rl.kl_coef > 0, the "
            "coefficient it starts from"
        )
    if c.rl.memorise_coef:
        _check_multiple(c, "rl.memorise_rows", "rl.micro_batch")
    if c.rl.memorise_coef and not c.models.rewriter.source:
        raise ValueError(
            f"config.rl.memorise_coef = {c.rl.memorise_coef} needs a model to rewrite "
            "retrieved facts as recalled: name one in config.models.rewriter.source"
        )


def _check_staleness(c):
    """Refuse settings of rollouts one step ahead that do not fit together."""
    if c.rollout.devices and c.rollout.global_mesh:
        raise ValueError(
            f"config.rollout.devices = {c.rollout.devices} does not go with "
            "config.rollout.global_mesh = True, with which all devices roll out"
        )
    _check_multiple(c, "rollout.devices", "mesh.tensor")
    if "rl" not in kinds(c):
        return
    if c.rollout.devices and not c.rl.max_staleness:
        raise ValueError(
            f"config.rollout.devices = {c.rollout.devices} wait for the others, and "
            "the others for them: config.rl.max_staleness must be 1"
        )
    if c.rl.max_staleness and c.rl.old_logprobs == "recompute" and not c.rl.tis_cap:
        raise ValueError(
            "config.rl.max_staleness = 1 with config.rl.old_logprobs = 'recompute' "
            "needs config.rl.tis_cap > 0: nothing else corrects for the difference "
            "between the policy that learns and the one that sampled"
        )


def _check_sft_batch(c):
    if "sft" not in kinds(c):
        return
    _check_multiple(c, "sft.batch_size", "sft.micro_batch")
    if c.sft.decay and c.sft.warmup_steps >= c.sft.steps:
        raise ValueError(
            f"config.sft.warmup_steps = {c.sft.warmup_steps} leaves no room for the "
            f"decay in config.sft.steps = {c.sft.steps}"
        )
    if c.sft.keep == "lowest_loss" and not c.sft.validation_share:
        raise ValueError(
            "config.sft.keep = 'lowest_loss' needs config.sft.validation_share > 0: "
            "without held-out questions there is no validation loss"
        )


def _check_moments(c):
    for name in ("b1", "b2"):
        decay = c.optim[name]
        if c.optim.moments_dtype == "bfloat16" and decay > MOST_BFLOAT16_DECAY:
            raise ValueError(
                f"config.optim.{name} = {decay}: must be <= {MOST_BFLOAT16_DECAY} with "
                "config.optim.moments_dtype = 'bfloat16', which has 8 bits: a moment "
                f"that decays by {1 - decay:.2g} of itself is rounded to its old value"
            )


def _check_offload(c):
    if c.model.lora_rank and "reference" in c.model.offload:
        raise ValueError(
            f"config.model.offload = {c.model.offload}: with config.model.lora_rank = "
            f"{c.model.lora_rank} the reference is the adapters' frozen base, "
            "which is always in use: remove 'reference'"
        )


def _check_curate(c):
    method = c.curate.method if "curate" in kinds(c) else None
    if method == "self_rag" and not c.curate.labels:
        raise ValueError(
            "config.curate.labels = '': config.curate.method = 'self_rag' needs a "
            "transcripts.jsonl with rows of direct and rag for config.data.train"
        )
    if method == "oracle" and c.models.writer.source:
        raise ValueError(
            f"config.models.writer.source = {c.models.writer.source!r}: config.curate."
            "method = 'oracle' calls no model and shows the passages themselves"
        )
    easy, hard, limit = c.curate.easy_below, c.curate.hard_above, c.curate.rollouts
    if method in ("difficulty", "mix") and easy > hard + 1:
        raise ValueError(
            f"config.curate.easy_below = {easy} and config.curate.hard_above = {hard} "
            "overlap: no question can be both"
        )
    if method == "difficulty" and limit < hard:
        raise ValueError(
            f"config.curate.rollouts = {limit} cannot tell which questions need more "
            f"than config.curate.hard_above = {hard}"
        )


def _check_shards(c, data=None):
    """Refuse micro-batches that do not split evenly over the devices."""
    data = max(c.mesh.data, 1) if data is None else data
    shards = data * c.mesh.fsdp
    for stage in sorted(kinds(c) - {"curate"}):
        rows = c[stage].micro_batch
        if rows % shards:
            raise ValueError(
                f"config.{stage}.micro_batch = {rows} is not a multiple of mesh.data x "
                f"mesh.fsdp = {data} x {c.mesh.fsdp} = {shards}"
            )


def _check_mesh(c, num_devices):
    """Refuse a mesh that does not fit the number of devices or the micro-batches."""
    model_shards, rollout_devices = c.mesh.fsdp * c.mesh.tensor, c.rollout.devices
    rolls_out_ahead = "rl" in kinds(c) and c.rl.max_staleness
    if rolls_out_ahead and num_devices > 1 and not rollout_devices:
        raise ValueError(
            f"config.rl.max_staleness = 1 on {num_devices} devices: rollouts during "
            "updates need devices of their own; set config.rollout.devices, which is "
            "0, to their number"
        )
    if rollout_devices >= num_devices:
        raise ValueError(
            f"config.rollout.devices = {rollout_devices} leave none of the "
            f"{num_devices} devices to learn on"
        )
    num_devices -= rollout_devices
    besides = f" besides config.rollout.devices = {rollout_devices}"
    data = num_devices // model_shards if c.mesh.data == -1 else c.mesh.data
    if data * model_shards != num_devices:
        raise ValueError(
            f"mesh does not fit: data {c.mesh.data} x fsdp {c.mesh.fsdp} x tensor "
            f"{c.mesh.tensor}, but there are {num_devices} devices"
            + (besides if rollout_devices else "")
        )
    _check_shards(c, data)


CROSS_CHECKS = (
    _check_sources,
    _check_paragraphs,
    _check_search,
    _check_global_mesh,
    _check_models,
    _check_sampling,
    _check_shape,
    _check_rl_batch,
    _check_rl_settings,
    _check_staleness,
    _check_sft_batch,
    _check_moments,
    _check_offload,
    _check_curate,
    _check_shards,
)


def validate(config: ConfigDict, *, num_devices: int | None = None) -> None:
    """Refuse a configuration that could not run as written.

    Args:
        num_devices: number of devices; with None the mesh is not checked.

    Raises:
        ValueError: names the field, its value and what would be right; for fields that
            do not fit together it shows the arithmetic.
    """
    _validate_stage(config, num_devices)
    for stage, config_of_stage in stage_configs(config):
        if config.overrides.get(stage):
            try:
                _validate_stage(config_of_stage, num_devices)
            except ValueError as error:
                raise ValueError(f"config.overrides.{stage}: {error}") from None
    for name, overrides in config.sets.items():
        try:
            apply_overrides(config, overrides.to_dict())
        except ValueError as error:
            raise ValueError(f"config.sets.{name}: {error}") from None


def searches_world(config: ConfigDict) -> bool:
    """Return whether searches are over the passages of the embedded world."""
    r = config.retrieval
    return r.corpus == WORLD and not (r.url or r.engine)


def validate_search(config: ConfigDict) -> None:
    """Refuse a configuration whose search could not be opened as written.

    Raises:
        ValueError: as in `validate`, for the fields that a search engine needs.
    """
    world = ["seed", "world"] if searches_world(config) else []
    _check_bounds(config, ["retrieval", *world])
    _check_search(config)


def _validate_stage(config, num_devices):
    """Check the configuration of one stage, with its overrides applied."""
    _check_bounds(config)
    for check in CROSS_CHECKS:
        check(config)
    if num_devices is not None:
        _check_mesh(config, num_devices)


def _check_bounds(config, sections=None):
    """Refuse a field outside its bound, in the given sections or (None) in all."""

    def is_checked(name):
        return sections is None or name.partition(".")[0] in sections

    bounds = {name: f.bound for name, f in base_fields().items() if f.bound}
    for name, value in fields(config).items():
        if is_checked(name) and isinstance(value, float) and not math.isfinite(value):
            bound = bounds.get(name)
            expected = bound.description if bound else "a finite number"
            raise ValueError(f"config.{name} = {value!r}: must be {expected}")
    for name, bound in bounds.items():
        value = config[name]
        if is_checked(name) and not bound.allows(value):
            plain_value = value.to_dict() if hasattr(value, "to_dict") else value
            raise ValueError(
                f"config.{name} = {plain_value!r}: must be {bound.description}"
            )
