"""Refuse fields of a new run that were set and would have no effect.

`config.checks` refuses what could not run; what is refused here would run, but not as
its author meant it. A stored configuration is not checked again: a run of an earlier
version must go on.
"""

from ml_collections import ConfigDict

from rsearch.config.spec import base_fields
from rsearch.config.stage_plan import ROLES, URLS, kinds, stage_configs

RUN_FIELDS = ("name", "stages", "overrides", "sets")  # no stage has its own
ENDPOINT_FIELDS = ("name", "api_key_env", "key_over_http", "timeout_seconds")
ENDPOINT_FIELDS += ("max_retries",)
STAGE_EVAL_FIELDS = ("every_steps", "passage_tokens")  # the rest of eval is the run's


def check_effective(config: ConfigDict) -> None:
    """Refuse fields of a new run that were set and would have no effect.

    Raises:
        ValueError: a field that no stage uses because of another field's value, a
            stage's override of a field that all stages share, or PPO that ends before
            its policy begins to learn.
    """
    for stage, overrides in config.overrides.items():
        for section, settings in overrides.items():
            names = [section] if section in RUN_FIELDS else []
            if section == "eval":
                names = [f"eval.{n}" for n in settings if n not in STAGE_EVAL_FIELDS]
            if names:
                raise ValueError(
                    f"config.overrides.{stage}.{names[0]} has no effect: all stages "
                    f"share config.{names[0]}"
                )
    stages = stage_configs(config)
    for stage, c in stages:
        num_pretrain = c.critic.pretrain_steps
        is_ppo = "rl" in kinds(c) and c.rl.algorithm == "ppo"
        if is_ppo and 0 < c.rl.steps <= num_pretrain:
            raise ValueError(
                f"config.critic.pretrain_steps = {num_pretrain}: must be below "
                f"config.rl.steps = {c.rl.steps}; the policy would learn in no step of "
                f"{stage}"
            )
    conditions = [(c, _conditions(c)) for _, c in stages]
    used = {name for _, needs in conditions for name in needs if needs[name][0]}
    for c, needs in conditions:
        for name, (_, need) in needs.items():
            default = base_fields()[name].default
            if name not in used and c[name] != default:
                raise ValueError(
                    f"config.{name} = {c[name]!r} has no effect without config.{need}: "
                    f"must be {default!r}"
                )


def _conditions(c):
    """Return {field: (whether a stage uses it, the value of another that uses it)}."""
    r, rl = c.retrieval, c.rl
    needs = {
        "model.lora_alpha": (c.model.lora_rank, "model.lora_rank > 0"),
        "model.lora_matrices": (c.model.lora_rank, "model.lora_rank > 0"),
        "retrieval.api": (r.url, "retrieval.url"),
        "retrieval.api_key_env": (r.url, "retrieval.url"),
        "retrieval.key_over_http": (r.url, "retrieval.url"),
        "retrieval.max_retries": (r.url, "retrieval.url"),
        "retrieval.page_chars": (r.fetch_pages, "retrieval.fetch_pages = True"),
        "retrieval.rerank_from": (r.reranker, "retrieval.reranker"),
        "eval.answer_from": (c.models.answerer.source, "models.answerer.source"),
    }
    for name in ROLES:
        needs[f"models.{name}.top_p"] = (
            c.models[name].temperature,
            f"models.{name}.temperature > 0",
        )
        is_endpoint = c.models[name].source.startswith(URLS)
        for field in ENDPOINT_FIELDS:
            needs[f"models.{name}.{field}"] = (
                is_endpoint,
                f"models.{name}.source = the URL of an endpoint",
            )
    if "sft" in kinds(c):
        needs["sft.chats_share"] = (c.sft.chats, "sft.chats")
    if "rl" in kinds(c):
        is_ppo = rl.algorithm == "ppo"
        compares_group = rl.algorithm in ("grpo", "rloo")
        needs |= {
            "rl.gamma": (is_ppo, "rl.algorithm = 'ppo'"),
            "rl.gae_lambda": (is_ppo, "rl.algorithm = 'ppo'"),
            "rl.kl_cap": (rl.kl_kind == "k3", "rl.kl_kind = 'k3'"),
            "rl.kl_credit": (
                compares_group and rl.kl_place == "reward",
                "rl.kl_place = 'reward' and rl.algorithm 'grpo' or 'rloo'",
            ),
            "rl.loss_tokens": (rl.loss_mean == "constant", "rl.loss_mean = 'constant'"),
        }
    return needs
