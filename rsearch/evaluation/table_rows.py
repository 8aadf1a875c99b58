"""Match rows of results.json to the rows of a paper's table."""

import functools
import re
from collections.abc import Mapping

from rsearch.config.recipes import apply_overrides, defaults, fields, from_json, load
from rsearch.config.stage_plan import START
from rsearch.data.sets import PREFIX, SETS
from rsearch.evaluation.tables import PaperRow, PaperTable
from rsearch.methods.names import split_name

PROTOCOL = "protocol"  # the method of a recipe's rows, unless they name another
# Fields that name the answering model: the policy, the subject or the reader.
MODEL_FIELDS = ("model.source", "models.subject.name", "models.subject.source")
MODEL_FIELDS += ("models.reader.name", "models.reader.source")
# Settings that do not distinguish runs: locations, and the number of steps.
IGNORED_SUFFIXES = (".train", ".index", ".url", ".steps")


def is_of_set(dataset: str, name: str) -> bool:
    """Return whether a row of results.json was measured on a published set.

    Args:
        dataset: dataset of the row: the set's name, "set:NAME", "set:NAME=FILE" or its
            source on the hub. A suffix "[:N]" stands for its first N questions, and
            "[:N by seed S]" for N that are drawn.
        name: key of `rsearch.data.sets.SETS`.
    """
    dataset = re.sub(r"\[:\d+( by seed \d+)?\]$", "", dataset)
    return dataset.startswith(f"{PREFIX}{name}=") or dataset in (
        name,
        f"{PREFIX}{name}",
        SETS[name].source,
    )


def is_of_row(
    result: Mapping, config: Mapping, row: PaperRow, *, is_named: bool
) -> bool:
    """Return whether a row of results.json counts for a row of a paper's table.

    A table row without a recipe takes results of a model that the run has not trained.
    One with a recipe takes results from after its stage or, if --runs names the run for
    it, from a --model. A run that is not named must also match its recipe and model.

    Args:
        config: {dotted name: value} of the run that holds it.
        is_named: whether --runs names the run for this row.
    """
    is_untrained = result["stage"] not in config["stages"]
    name, settings = split_name(result["method"])
    method, needed_settings = split_name(row.method or PROTOCOL)
    if not row.is_runnable or name != method or not {*needed_settings} <= {*settings}:
        return False
    if not row.recipe:
        if not is_untrained:
            return False
    elif result["stage"] != row.stage:
        return is_named and is_untrained and result["stage"] != START
    elif not is_named and config["name"] != _fields(row.recipe, row.settings)["name"]:
        return False
    made_by = result.get("made_by", {})
    return is_named or row.model in [made_by.get(name) for name in MODEL_FIELDS]


def is_run_of_row(
    config: Mapping, row: PaperRow, settings: Mapping[str, Mapping]
) -> bool:
    """Return whether a run has trained a row's recipe from the row's model."""
    recipe_fields = _fields(row.recipe, row.settings) if row.recipe else {}
    return (
        config["name"] == recipe_fields.get("name")
        and row.model == config.get("model.source")
        and has_settings({}, config, settings)
    )


def settings_of(table: PaperTable, row: PaperRow) -> dict[str, dict]:
    """Return the settings that distinguish a row's runs from those of other rows.

    Returns:
        {field or section: {field: value}}: the row's values of all that it sets and, if
        it has a recipe, of all that other rows with that recipe set; without
        IGNORED_SUFFIXES.
    """
    rows = [r for r in table.rows if r.recipe == row.recipe] if row.recipe else [row]
    texts = [text for r in rows for text in r.settings + r.asking]
    names = dict.fromkeys(text.partition("=")[0] for text in texts)
    values = _fields(row.recipe, row.settings + row.asking) if names else {}
    return {
        n: _fields_under(values, n) for n in names if not n.endswith(IGNORED_SUFFIXES)
    }


def has_settings(
    result: Mapping, config: Mapping, settings: Mapping[str, Mapping]
) -> bool:
    """Return whether a row of results.json was measured with these settings."""
    words = result.get("setting", "").split(", ")
    overrides = {name: value for name, _, value in (w.partition("=") for w in words)}
    values = {**config, **result.get("made_by", {})}
    return all(
        overrides[name] == str(setting_fields.get(name))
        if name in overrides
        else (_fields_under(values, name) or _fields_under(_fields("", ()), name))
        == setting_fields
        for name, setting_fields in settings.items()
    )


@functools.cache
def _fields(recipe, settings):
    """Return {dotted name: value} of a recipe, or the defaults, after `settings`."""
    config = load(recipe) if recipe else from_json(defaults())
    return fields(apply_overrides(config, settings))


def _fields_under(values, name):
    """Return {field: value as in JSON} of a field or section; no IGNORED_SUFFIXES."""
    return {
        field: [*value] if isinstance(value, tuple) else value
        for field, value in values.items()
        if f"{field}.".startswith(f"{name}.") and not field.endswith(IGNORED_SUFFIXES)
    }


def number_of(result: Mapping, metric: str) -> float | None:
    """Return a metric of a row of results.json, or None; seconds are per rollout."""
    value = result.get(metric)
    if metric != "seconds" or value is None:
        return value
    rollouts = result.get("rollouts") or result.get("n")
    return value / rollouts if rollouts else None
