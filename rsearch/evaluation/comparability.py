"""Record how a row of results was measured, and find out where rows differ in that.

Rows of one table must be measured on the same questions and by the same rules: they
agree in the fields of MUST_BE_EQUAL and, if there is a judge, in the judge's. They may
differ in everything else, such as weights, method and budgets, which is what a table
compares. A row does not record what its method does not use, such as the retriever of a
method that does not search.

The embedded world's questions and passages are drawn by config.seed. Runs with
different seeds have different ones, and are comparable if they draw from one world.
"""

import math
import reprlib
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from rsearch.config.fields import fields, fingerprint
from rsearch.config.spec import base_fields
from rsearch.methods.names import OTHER_METHODS, split_name
from rsearch.runtime.console import clean_line

MADE_BY, JUDGED_BY = "made_by", "judged_by"  # objects in a row
QUESTIONS, RETRIEVAL, ENCODER = "questions", "retrieval", "retrieval.encoder"
WORLD = "world"
IN_MEMORY = "memory:"  # prefix of the digest of passages that are in no file
ADDRESSES = ("retrieval.url",)  # a service's address may change from day to day
MUST_BE_EQUAL = (
    *(QUESTIONS, "normalize", "eval.answer_from"),
    *(RETRIEVAL, "retrieval.url", "retrieval.top_k"),
    *("sampling.temperature", "sampling.top_p"),
)
MODEL_FIELDS = ("source", "name", "temperature", "top_p")
MODEL_FIELDS += ("max_prompt_tokens", "max_reply_tokens")
JUDGE_FIELDS = (*MODEL_FIELDS, "prompt", "golds")
WEIGHTS = "weights"  # also a judge's, if they were read from a directory
MAX_SHOWN = 80  # characters of a value in a message

# {method: what its answers depend on}, by keys of FIELDS. Any other method is a program
# that asks the policy and searches.
PROGRAM = ("policy", "search")
DEPENDENCIES = {
    "protocol": ("policy", "search", "conversation", "writer", "answerer"),
    "direct": ("policy",),
    "cot": ("policy",),
    "in_context": ("policy",),
    "evidence": ("policy", "search", "conversation", "writer", "reader"),
    "reader_direct": ("reader",),
    "reader_rag": ("search", "reader"),
}
FIELDS = {
    "policy": (
        *("model.source", "model.dtype", "protocol.direct", "protocol.rag"),
        *("rollout.max_turn_tokens", "rollout.max_observation_tokens"),
    ),
    "search": ("retrieval.url", "retrieval.top_k", ENCODER, "retrieval.reranker"),
    "conversation": (
        *("protocol.name", "protocol.tools", "protocol.max_queries"),
        *("protocol.quotes_keep_commas", "protocol.json_ascii"),
        *("protocol.instruction", "protocol.system", "protocol.invalid_message"),
        *("rollout.max_searches", "rollout.forced_final_turn", "rollout.on_invalid"),
        "rollout.cut_tags",
    ),
    "writer": ("retrieval.writer_prompt", "rollout.max_written_tokens"),
    "answerer": ("eval.answer_from",),
    "reader": ("protocol.direct",),
    "subject": (
        *("protocol.direct", "protocol.rag"),
        *("rollout.max_turn_tokens", "rollout.max_observation_tokens"),
    ),
}
MODELS = ("writer", "answerer", "reader", "subject")  # models other than the policy
PARAMS = "params"  # of the policy; `model.weights` are those that training started from
# What a table compares, and shows in columns: the seeds and checkpoints of runs.
COMPARED = ("seed", PARAMS)
# Fields of config.eval that change no answer. All others count, including those that
# later versions add.
NO_ANSWERS = ("at_start", "every_steps", "methods", "max_questions", "examples")
NO_ANSWERS += ("draw_seed", "normalize", "judge_prompt", "judge_golds")
# The same, and fields that a row has under other names.
NO_SETTINGS = (*NO_ANSWERS, "answer_from", "drop_long")
NO_SETTINGS += ("temperature", "top_p", "samples", "seeds")
SAMPLES, SEEDS = "sampling.samples", "sampling.seeds"  # only in rows with samples


def row_manifest(
    config: ConfigDict,
    method: str,
    *,
    inputs: Mapping[str, str],
    sampling: Mapping[str, Any],
    settings: Mapping[str, Any] = types.MappingProxyType({}),
    digest: str = "",
) -> dict[str, Any]:
    """Return {field: JSON value} of everything that a method's answers depend on.

    Code, libraries and devices are in run.json, in the entry that a row's `start`
    names. Stage and step are fields of the row.

    Args:
        inputs: {name: fingerprint} of the inputs that the configuration names.
        sampling: how the policy's tokens are sampled: {"temperature", "top_p"}, and for
            rows with samples also {"samples": number per question and seed, "seeds": a
            list}. A subject's temperature and top-p replace the policy's.
        settings: {name: value} of all settings of the method.
        digest: fingerprint of the policy's parameters; "" records none.

    Returns:
        {name of a field of the configuration: value}, and {"<method>.<setting>": value}
        of the method's settings, so that rows with other defaults differ. "tokenizer"
        (with its chat template), "retrieval" (corpus, index and encoder) and the
        "weights" of models that were read from a directory are fingerprints. "params"
        is the digest, which distinguishes the weights of the same stage and step in two
        runs.
    """
    method_name, values = split_name(method)[0], fields(config)
    uses = DEPENDENCIES.get(method_name, PROGRAM)
    if method_name not in OTHER_METHODS and values["models.subject.source"]:
        uses = tuple("subject" if group == "policy" else group for group in uses)
    unused_roles = {role for role in MODELS if not values[f"models.{role}.source"]}
    uses = tuple(group for group in uses if group not in unused_roles)
    names = [name for group in uses for name in FIELDS[group]]
    roles = [role for role in MODELS if role in uses]
    role_fields = [f"models.{role}.{name}" for role in roles for name in MODEL_FIELDS]
    # A subject has no budgets.
    names += [name for name in role_fields if name in values]
    names += [
        name
        for name in values
        if name.startswith("eval.") and name.partition(".")[2] not in NO_SETTINGS
    ]
    policy_scores = "subject" in uses and bool(values["eval.scored_by"])
    asks_policy = "policy" in uses or policy_scores
    names += ["model.source", "model.dtype"] if policy_scores else []
    manifest = {name: values[name] for name in ("seed", *names)}
    if "search" in uses:
        manifest[RETRIEVAL] = inputs["retrieval"]
    if {"policy", "subject"} & {*uses}:  # passages are cut by its tokens
        manifest["tokenizer"] = inputs["tokenizer"]
    sampling_fields = {f"sampling.{name}": value for name, value in sampling.items()}
    if asks_policy and digest:
        manifest[PARAMS] = digest
    if "policy" in uses:
        manifest |= sampling_fields
    elif "subject" in uses:
        manifest |= sampling_fields | {
            f"sampling.{name}": values[f"models.subject.{name}"]
            for name in ("temperature", "top_p")
        }
    sections = ["model"] if asks_policy else []
    for section in [*sections, *(f"models.{role}" for role in roles)]:
        if weights := _weights(inputs, section):
            manifest[f"{section}.{WEIGHTS}"] = weights
    manifest |= {f"{method_name}.{n}": value for n, value in settings.items()}
    # JSON reads tuples back as lists.
    return {n: [*v] if isinstance(v, tuple) else v for n, v in manifest.items()}


def judge_manifest(config: ConfigDict, inputs: Mapping[str, str]) -> dict[str, Any]:
    """Return {field: JSON value} that describes the judge; {} without a judge.

    Returns:
        {name in JUDGE_FIELDS: value}, and "weights" if they come from a directory.
    """
    judge, c = config.models.eval_judge, config.eval
    if not judge.source:
        return {}
    manifest = {name: judge[name] for name in MODEL_FIELDS}
    manifest |= {"prompt": c.judge_prompt, "golds": c.judge_golds}
    if digest := _weights(inputs, "models.eval_judge"):
        manifest[WEIGHTS] = digest
    return manifest


def answers_fingerprint(config: ConfigDict) -> str:
    """Return a fingerprint of the fields that answers depend on, whatever the method.

    An evaluation that resumes reuses its answers if this is equal. Budgets of memory,
    timeouts and whatever else may change when a run resumes do not count, nor do the
    methods, the judge and other sets of questions.
    """
    model_fields = {f"models.{role}.{name}" for role in MODELS for name in MODEL_FIELDS}

    def is_used(name):
        section, _, rest = name.partition(".")
        if section == "eval":
            return rest not in NO_ANSWERS
        if section == "sets" or name.startswith("models.eval_judge."):
            return False
        field = base_fields().get(name)  # there is none in a recipe's own reward terms
        return name in model_fields or field is None or not field.may_change

    values = fields(config.to_dict())
    return fingerprint({n: v for n, v in values.items() if is_used(n)})


def _weights(inputs, section):
    """Return one digest of a model's files of weights; "" if none were read."""
    digests = inputs.get(f"{section}.source", "")
    return fingerprint({"files": digests}) if digests else ""


def is_same_manifest(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a recorded manifest agrees with the current one.

    Fields that only one of them has do not count: an earlier version recorded fewer,
    and a start that loads no models does not read their weights. Addresses of services
    may change.

    Args:
        before, now: results of `row_manifest`, or of `judge_manifest`.
    """
    common_fields = (before.keys() & now.keys()) - {*ADDRESSES}
    # These count even if one row lacks them: in all versions it then has no samples.
    if any(before.get(name) != now.get(name) for name in (SAMPLES, SEEDS)):
        return False
    return all(before[name] == now[name] for name in common_fields)


def manifest_fault(row: Mapping[str, Any]) -> str:
    """Return which field of a row's manifests has an invalid value, and why; or ""."""
    for name in (MADE_BY, JUDGED_BY):
        manifest = row.get(name, {})
        if not isinstance(manifest, dict):
            return f"{name} = {reprlib.repr(manifest)}: expected an object"
        for field, value in manifest.items():
            values = value if isinstance(value, list) else [value]
            if not all(map(_is_scalar, values)):
                texts = reprlib.repr(field), reprlib.repr(value)
                return f"{name}[{texts[0]}] = {texts[1]}: expected text or a number"
    return ""


def _is_scalar(value):
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return is_finite and isinstance(value, str | int | float | None)


class RowFacts(NamedTuple):
    """The settings that a row of results was measured with.

    Attributes:
        dataset: its dataset; rows of different datasets are not compared.
        seed: seed of its run.
        required: {field: value} of what must be equal. The world's settings must be
            equal only between rows of different seeds.
        other_fields: {field: value} of everything else.
        drawn: fields of `required` whose values the seed draws.
        missing: names of fields that the row should record but does not.
    """

    dataset: str
    seed: int
    required: dict[str, Any]
    other_fields: dict[str, Any]
    drawn: frozenset[str]
    missing: tuple[str, ...]


class Difference(NamedTuple):
    """A field that must be equal but is not.

    Attributes:
        other: the value of the row that it is compared with.
        position: position of that other row.
    """

    field: str
    value: Any
    other: Any
    position: int

    def __str__(self) -> str:
        """Return the difference as text."""
        return f"{self.field} = {value_text(self.value)}, not {value_text(self.other)}"


def row_facts(row: Mapping[str, Any], config: Mapping[str, Any]) -> RowFacts:
    """Return what a row records about how it was measured.

    Args:
        row: row of results.json.
        config: {dotted name: value} of the run.
    """
    made_by, judged_by = row.get(MADE_BY, {}), row.get(JUDGED_BY, {})
    names = (QUESTIONS, "normalize")
    record = {n: row[n] for n in names if isinstance(row.get(n), str)}
    missing = {*names} - record.keys()
    missing |= set() if made_by else {MADE_BY}
    record |= made_by
    required = {name: record[name] for name in MUST_BE_EQUAL if name in record}
    if judged_by:
        missing |= {f"{JUDGED_BY}.{n}" for n in JUDGE_FIELDS if n not in judged_by}
        names = [n for n in (*JUDGE_FIELDS, WEIGHTS) if n in judged_by]
        required |= {f"{JUDGED_BY}.{n}": judged_by[n] for n in names}
    drawn_fields = {QUESTIONS} if row["dataset"].startswith(f"{WORLD}:") else set()
    digest, _, encoder = str(required.get(RETRIEVAL, "")).partition(" ")
    if digest.startswith(IN_MEMORY):
        required |= {RETRIEVAL: digest, ENCODER: encoder}
        drawn_fields.add(RETRIEVAL)
    if drawn_fields:
        settings = {n: v for n, v in config.items() if n.startswith(f"{WORLD}.")}
        settings.pop(f"{WORLD}.train_questions", None)  # evaluations ask none of those
        required |= settings
    other_fields = {
        name: value
        for name, value in record.items()
        if name not in required and name not in COMPARED
    }
    if row.get("asks"):
        other_fields["asks"] = row["asks"]
    return RowFacts(
        row["dataset"],
        config["seed"],
        required,
        other_fields,
        frozenset(drawn_fields),
        tuple(sorted(missing)),
    )


def disagreements(rows: Sequence[RowFacts]) -> list[list[Difference]]:
    """Return how each row differs, field by field, from the first that it must equal.

    Args:
        rows: rows of one table. Each is compared with the first row of its dataset that
            records the field or, if the seed draws the value, with the first such row
            of its seed.
    """
    first_positions: dict[tuple, int] = {}
    results = []
    for i, row in enumerate(rows):
        results.append([])
        for name, value in row.required.items():
            position = first_positions.setdefault((row.dataset, name), i)
            if name in row.drawn and name in rows[position].drawn:
                position = first_positions.setdefault((row.dataset, name, row.seed), i)
            other = rows[position].required[name]
            # Worlds of one seed are compared by what they drew, not by their settings.
            is_same_seed = row.seed == rows[position].seed
            if is_same_seed and name.startswith(f"{WORLD}."):
                continue
            if value != other:
                results[-1].append(Difference(name, value, other, position))
    return results


def value_text(value: Any) -> str:
    """Return a recorded value as shown in a message or a table, on one line at most."""
    if isinstance(value, str):
        value = clean_line(value)
    text = str(value) if isinstance(value, str) and value else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def shown_fields(rows: Sequence[RowFacts]) -> list[str]:
    """Return the names of the fields that may differ, and do so between these rows."""
    values: dict[str, list] = {}
    for row in rows:
        for name, value in row.other_fields.items():
            values.setdefault(name, []).append(value)
    return [
        name
        for name, field_values in values.items()
        if any(v != field_values[0] for v in field_values)
    ]
