"""Name the fields of a configuration by dotted paths, override and compare them.

A configuration is a locked `ml_collections.ConfigDict`; 'optim.b1' names a field of it.
Most callers take these functions from `rsearch.config.recipes`.
"""

import ast
import copy
import difflib
import hashlib
import json
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict, FieldReference

from rsearch.text.spelling import did_you_mean

OPEN_SECTIONS = ("reward", "overrides", "sets")
"""Sections whose keys are the recipe's own; an override replaces the whole section."""

ABSENT = "(absent)"

_ROLES = ("judge", "rewriter", "writer", "answerer", "reader")
RENAMED = {  # a field's name in an earlier version -> its current name
    "rollout.slots": "rollout.max_concurrent",
    "rollout.together": "rollout.global_mesh",
    "rl.refill_rounds": "rl.dynamic_sampling_rounds",
    "rl.behavior": "rl.old_logprobs",
    "retrieval.writing": "retrieval.writer_prompt",
    **{role: f"models.{role}" for role in _ROLES},
    **{f"{role}.slots": f"models.{role}.max_concurrent" for role in _ROLES},
}
RENAMED_VALUES = {"rl.behavior": {"sampled": "sampler", "scored": "recompute"}}
"""Values of renamed fields that were renamed too: {old field: {old: new value}}."""


def renamed(name: str) -> str | None:
    """Return the current name of a field of an earlier version, or None."""
    section, _, rest = name.partition(".")
    if name not in RENAMED and section in RENAMED and rest:
        return f"{RENAMED[section]}.{rest}"
    return RENAMED.get(name)


def renaming(name: str) -> str:
    """Return "<name> is now <new name>" and any renamed values, or ""."""
    stage, old_name = _split_stage(name)
    new_name = renamed(old_name)
    values = RENAMED_VALUES.get(old_name, {}).items()
    words = "".join(
        f", {old_value!r} is {new_value!r}" for old_value, new_value in values
    )
    return f"config.{name} is now config.{stage}{new_name}{words}" if new_name else ""


def _split_stage(name):
    """Split a name into "overrides.<stage>." (or "") and the field."""
    stage = re.match(r"overrides\.\w+\.", name)
    prefix = stage[0] if stage else ""
    return prefix, name.removeprefix(prefix)


def rename_fields(config: dict) -> dict:
    """Return a configuration of JSON values, or a part of one, with current names.

    Args:
        config: {section: {field: value}} as an earlier version wrote it, including the
            overrides of its stages.
    """
    result = {}
    for name, value in fields(config).items():
        prefix, old_name = _split_stage(name)
        if old_name in RENAMED_VALUES:
            value = RENAMED_VALUES[old_name].get(value, value)
        *path, leaf = f"{prefix}{renamed(old_name) or old_name}".split(".")
        section = result
        for key in path:
            section = section.setdefault(key, {})
        section[leaf] = value
    return result


def fields(config: ConfigDict | dict) -> dict[str, Any]:
    """Return {dotted name: value} of every field; an empty section is kept as {}."""
    values = {}
    for key, value in config.items():
        is_section = isinstance(value, ConfigDict | dict) and len(value)
        inner = fields(value) if is_section else {None: value}
        for rest, leaf in inner.items():
            values[str(key) if rest is None else f"{key}.{rest}"] = leaf
    return values


def check_known(config: ConfigDict, name: str) -> None:
    """Refuse a dotted name that is neither a field nor a section of `config`.

    Raises:
        ValueError: suggests the closest known name.
    """
    node = config
    for key in name.split("."):
        if not isinstance(node, ConfigDict) or key not in node:
            if hint := renaming(name):
                raise ValueError(hint)
            known_names = sorted(fields(config))
            # A known field in a wrong section ('optim.lr') suggests the right sections.
            leaf = name.split(".")[-1]
            namesakes = [k for k in known_names if k.split(".")[-1] == leaf]
            close_matches = difflib.get_close_matches(name, known_names, 1, 0.9)
            hint = did_you_mean(
                name, known_names, prefix="config.", near=close_matches or namesakes[:3]
            )
            hint = hint or "; --print_config prints all fields"
            raise ValueError(f"unknown field config.{name}{hint}")
        node = node[key]


def apply_overrides(
    config: ConfigDict, overrides: Mapping[str, Any] | Sequence[str]
) -> ConfigDict:
    """Return a copy of `config` with fields set.

    Args:
        overrides: {'a.b': value}, nested dicts of the same, or a sequence of strings
            'a.b=value' from the command line. A string is parsed as the field's type;
            an open section (reward) takes a dict, or a dict as a Python literal.

    Raises:
        ValueError: an unknown field, a value of the wrong type, or a field set twice to
            different values.
    """
    result = copy.deepcopy(config).lock()  # a deep copy keeps placeholders' types
    is_text = not hasattr(overrides, "items")
    pairs = list(map(_split, overrides) if is_text else _flat(result, overrides))
    values_by_name = {}
    for name, value in pairs:
        if not (_is_reward_setting(name) or _is_new_stage_field(result, name)):
            check_known(result, name)
        for other, other_value in values_by_name.items():
            has_conflict = other == name and other_value != value
            is_nested = name.startswith(f"{other}.") or other.startswith(f"{name}.")
            if has_conflict or is_nested:
                raise ValueError(
                    "conflicting overrides: "
                    f"config.{other}={other_value!r} and config.{name}={value!r}"
                )
        values_by_name[name] = value
    for name, value in values_by_name.items():
        if _is_reward_setting(name):
            _set_reward(result, name, value, is_text)
        elif not _is_new_stage_field(result, name):
            _set(result, name, value)
    for name, value in values_by_name.items():  # last, when the stages are known
        if _is_new_stage_field(result, name):
            _add_stage_field(result, name, value, is_text)
    return result


def _is_new_stage_field(config, name):
    """Return whether this is 'overrides.<stage>.<field>' that `config` lacks."""
    is_stage_field = bool(_split_stage(name)[0]) and not renaming(name)
    return is_stage_field and name not in fields(config)


def _add_stage_field(config, name, value, is_text):
    """Override a field in one stage, with a value of the field's type."""
    prefix, field = _split_stage(name)
    stage = prefix.split(".")[1]
    if stage not in config.stages and stage not in config.overrides:
        raise ValueError(
            f"config.{name} is for no stage: the run has {', '.join(config.stages)}"
        )
    overrides = config.overrides.to_dict()
    stage_overrides = overrides.setdefault(stage, {})
    setting = [f"{field}={value}"] if is_text else {field: value}
    try:
        changed = apply_overrides(apply_overrides(config, stage_overrides), setting)
    except ValueError as error:
        raise ValueError(f"config.overrides.{stage}: {error}") from None
    *path, leaf = field.split(".")
    if path and path[0] in OPEN_SECTIONS:  # a stage's override replaces all of it
        stage_overrides[path[0]] = changed[path[0]].to_dict()
    else:
        section = stage_overrides
        for key in path:
            section = section.setdefault(key, {})
        section[leaf] = changed[field]
    config.overrides = ConfigDict(overrides).lock()


def _is_reward_setting(name):
    """Return whether this names a setting of a reward term: 'reward.<term>.<setting>'.

    Terms and their settings are not fields of configs/base.py, so an override may set
    one that the recipe lacks. `rewards.group.check_terms` refuses unknown ones.
    """
    section, *rest = name.split(".")
    return section == "reward" and len(rest) == 2 and all(rest)


def _set_reward(config, name, value, is_text):
    """Set a setting of a reward term; add the term if the recipe lacks it."""
    _, term, setting = name.split(".")
    settings = config.reward[term].to_dict() if term in config.reward else {}
    if is_text and not isinstance(settings.get(setting), str):
        value = _plain_value(value)
    settings[setting] = value
    with config.unlocked():
        config.reward[term] = ConfigDict(settings).lock()


def _plain_value(text):
    """Return the value of a command line's text such as '0.1', 'true' or 'None'."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, int | float | str | tuple | None) else text


def _flat(config, overrides, prefix=""):
    """Yield (dotted name, value) of every override, with nested dicts flattened."""
    for key, value in overrides.items():
        name = f"{prefix}{key}"
        is_dict = isinstance(value, dict | ConfigDict)
        if is_dict and name not in OPEN_SECTIONS:
            check_known(config, name)
            yield from _flat(config, value, f"{name}.")
        else:
            yield name, value


def _split(text):
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"override {text!r} is not of the form field=value")
    return name.removeprefix("config."), value


def _set(config, name, value):
    *path, leaf = name.split(".")
    node = config
    for key in path:
        node = node[key]
    current = node[leaf]
    if isinstance(current, ConfigDict):
        node[leaf] = ConfigDict(_section(name, value, current)).lock()
        return
    kind = node.get_type(leaf)
    # Only a field that is None by default is a reference, whatever its value now.
    members = dict(node.items(preserve_field_references=True))
    may_be_none = isinstance(members[leaf], FieldReference)
    if value is None or (may_be_none and value == "None"):
        if not may_be_none:
            raise ValueError(f"config.{name} = None: expected {kind.__name__}")
        node[leaf] = None
        return
    node[leaf] = convert(f"config.{name}", value, kind, current)


def _section(name, value, current):
    """Return the dict that replaces an open section."""
    if name not in OPEN_SECTIONS:
        names = ", ".join(f"config.{name}.{key}" for key in current)
        raise ValueError(f"config.{name} is a section; set one of {names}")
    if isinstance(value, ConfigDict):
        return value.to_dict()
    expected = f"config.{name} = {value!r}: expected {{name: {{setting: value}}}}"
    if isinstance(value, str):
        try:
            value = _literal(name, value)
        except ValueError:
            raise ValueError(f"{expected}, as Python writes it") from None
    if not isinstance(value, dict) or not all(
        isinstance(key, str) and isinstance(settings, dict | ConfigDict)
        for key, settings in value.items()
    ):
        raise ValueError(expected)
    if dotted_key := next((key for key in _keys(value) if "." in key), None):
        raise ValueError(
            f"config.{name} = {value!r}: {dotted_key!r} has a dot; nest dicts instead"
        )
    return value


def _keys(section):
    """Yield the keys of a dict and of the dicts in it."""
    for key, value in section.items():
        yield str(key)
        if isinstance(value, dict | ConfigDict):
            yield from _keys(value)


def _literal(name, text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"{name} = {text!r}: not a Python literal") from None


def convert(name: str, value: Any, kind: type, current: Any = None) -> Any:
    """Convert a value to a `kind`: strings are parsed, an int may become a float."""
    if kind in (tuple, list):
        return kind(_items(name, value, kind, current))
    try:
        if kind is bool:
            if isinstance(value, str):
                return {"true": True, "false": False}[value.strip().lower()]
            if isinstance(value, bool):
                return value
        elif kind is int and not isinstance(value, bool):
            return int(value) if isinstance(value, str) else operator.index(value)
        elif kind is float and not isinstance(value, bool):
            return float(value)
        elif kind is str and isinstance(value, str):
            return value
        elif kind is type(None):
            raise AssertionError(f"{name} needs placeholder(type), not None")
    except (ValueError, TypeError, KeyError, OverflowError):
        pass
    expected = "true or false" if kind is bool else kind.__name__
    raise ValueError(f"{name} = {value!r}: expected {expected}")


def _items(name, value, expected_kind, current):
    """Return the items of a sequence: '(1, 2)', '["a"]', or words between commas.

    They are converted to the type of the current items; for an empty one, to strings.
    """
    if isinstance(value, str):
        text = value.strip()
        is_literal = text.startswith(("(", "["))
        words = [word.strip() for word in text.split(",") if word.strip()]
        value = _literal(name, text) if is_literal else words
    if not isinstance(value, tuple | list):
        raise ValueError(f"{name} = {value!r}: expected {expected_kind.__name__}")
    kinds = {str} if current == () else {type(item) for item in current or ()}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        return value
    return [convert(f"{name}[{i}]", item, kind) for i, item in enumerate(value)]


def to_json(config: ConfigDict | dict) -> str:
    """Return the configuration as indented JSON; equal values give equal text."""
    values = config.to_dict() if isinstance(config, ConfigDict) else config
    return json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n"


def fingerprint(config: ConfigDict | dict) -> str:
    """Return 16 hexadecimal digits that differ if any value differs."""
    return hashlib.blake2b(to_json(config).encode(), digest_size=8).hexdigest()


def diff(old: ConfigDict | dict, new: ConfigDict | dict) -> list[tuple[str, Any, Any]]:
    """Return [(dotted name, old value, new value)] of the fields that differ, sorted.

    Either side may be a configuration or a dict from `json.loads(to_json(config))`. The
    value of a field that one side lacks is ABSENT.
    """
    sides = [fields(json.loads(to_json(side))) for side in (old, new)]
    names = sorted(sides[0].keys() | sides[1].keys())
    rows = [(n, sides[0].get(n, ABSENT), sides[1].get(n, ABSENT)) for n in names]
    return [(n, a, b) for n, a, b in rows if type(a) is not type(b) or a != b]
