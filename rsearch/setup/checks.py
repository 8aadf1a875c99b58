"""Check the names and layout in a configuration before anything is loaded."""

import math

from ml_collections import ConfigDict

from rsearch.config.stage_plan import stage_configs
from rsearch.methods.names import OTHER_METHODS
from rsearch.methods.table import make_program, needs_control_tokens, needs_samples
from rsearch.models.spec import DecoderSpec
from rsearch.retrieval.user import signature_of
from rsearch.rewards.group import check_terms
from rsearch.setup.policy import policy_protocol
from rsearch.text.extension import check_callable, is_reference, load_reference
from rsearch.tools.table import check_tools

LOSS_SIGNATURE = (
    "(logp, behavior_logp, advantage, from_policy, *, low, high) -> loss, is_clipped"
)


def check_names(config: ConfigDict) -> None:
    """Refuse names of reward terms, protocols, tools and methods that do not exist.

    All stages are checked.

    Raises:
        ValueError: names the field, its value and what would be right.
    """
    _check_names(config)
    for stage, stage_config in stage_configs(config):
        try:
            _check_names(stage_config)
        except ValueError as error:
            raise ValueError(f"config.overrides.{stage}: {error}") from None


def _check_names(c):
    check_terms(c.reward, has_judge=bool(c.models.judge.source))
    protocol = policy_protocol(c)
    check_tools(c.protocol.tools)
    for method in c.eval.methods:
        if method not in OTHER_METHODS:
            make_program(method)
            if needs_samples(method):
                check_sampled(c, f"config.eval.methods = {method!r}")
            if needs_control_tokens(method) and c.models.subject.source:
                raise ValueError(
                    f"config.eval.methods = {method!r} needs control tokens in its "
                    "prompts, which the endpoint in config.models.subject.source "
                    "does not accept: use 'self_rag:spelled=true', which needs none"
                )
    if "evidence" in c.eval.methods and protocol.evidence_tag is None:
        raise ValueError(
            "config.eval.methods names 'evidence', which needs a protocol with "
            f"evidence, such as 'r_search'; config.protocol.name = {c.protocol.name!r}"
        )
    for field, name, signature in (
        ("curate.method", c.curate.method, "(stage) -> Selection"),
        ("retrieval.engine", c.retrieval.engine, ""),
        ("rl.loss", c.rl.loss, LOSS_SIGNATURE),
    ):
        if is_reference(name):
            function = load_reference(f"config.{field}", name)
            signature = signature or signature_of(function)
            check_callable(f"config.{field}", name, function, signature)


def check_sampled(c: ConfigDict, field: str) -> None:
    """Refuse a temperature of 0 for a method that compares samples.

    Args:
        field: the field, and its value, that compares samples.

    Raises:
        ValueError: names both fields.
    """
    name = "models.subject" if c.models.subject.source else "eval"
    if c[name].temperature == 0:
        raise ValueError(
            f"{field}: samples would all be the same with config.{name}.temperature = "
            "0, which takes the likeliest token; a higher temperature samples"
        )


def check_layout(c: ConfigDict, spec: DecoderSpec) -> None:
    """Refuse a mesh whose axes do not divide the model's dimensions.

    Raises:
        ValueError: names the axis.
    """
    dimensions = {
        "num_heads": (spec.num_heads, "tensor"),
        "num_kv_heads": (spec.num_kv_heads, "tensor"),
        "mlp_width": (spec.mlp_width, "tensor"),
        "width": (spec.width, "fsdp"),
    }
    for name, (size, axis) in dimensions.items():
        if size % c.mesh[axis]:
            common = math.gcd(*(n for n, other in dimensions.values() if other == axis))
            divisors = [n for n in range(1, min(common, 64) + 1) if common % n == 0]
            raise ValueError(
                f"config.mesh.{axis} = {c.mesh[axis]} does not divide the "
                f"{name} {size} of {c.model.source or 'config.model'}: must be "
                f"{' or '.join(map(str, divisors))}"
            )
