"""Types that describe a field of a configuration: its default, meaning and bound.

configs/base.py defines every field, each once. `validate` checks a configuration
against the bounds, and a resumed run may change the fields marked `may_change`.
"""

import functools
import importlib.util
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from rsearch.text.extension import SPELLING, is_reference

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Bound(NamedTuple):
    """The values that a field may have.

    Attributes:
        allows: returns whether a value of the field's type is allowed.
        description: describes the allowed values, in messages "must be <description>".
    """

    allows: Callable[[Any], bool]
    description: str


class Field(NamedTuple):
    """A field of a configuration.

    Attributes:
        default: the default value; its type is the field's type.
        meaning: what the field sets, its unit, and what a value such as 0 or "" means.
        bound: the allowed values; None allows every value of the type.
        may_change: whether a resumed run may have another value, because the numbers
            it computes stay the same up to rounding.
        kind: the field's type if `default` is None.
        fixed_by: (field, value) of another field with which this one may not change in
            spite of `may_change`, because the numbers then depend on it.
    """

    default: Any
    meaning: str
    bound: Bound | None = None
    may_change: bool = False
    kind: type | None = None
    fixed_by: tuple[str, Any] | None = None


class Section:
    """Named fields and nested sections.

    Args:
        may_change: whether to mark all its fields `may_change`.
        members: {name: Field or Section}.
    """

    def __init__(self, meaning: str, /, *, may_change: bool = False, **members):
        self.meaning = meaning
        self.members: dict[str, Field | Section] = members
        if may_change:
            for name, field in members.items():
                members[name] = field._replace(may_change=True)

    def items(self) -> Iterator[tuple[str, Field]]:
        """Yield the dotted name and the Field of every field."""
        for name, member in self.members.items():
            if isinstance(member, Field):
                yield name, member
            else:
                for inner, field in member.items():
                    yield f"{name}.{inner}", field

    def config(self) -> ConfigDict:
        """Return a configuration with the default values."""
        c = ConfigDict()
        for name, member in self.members.items():
            if isinstance(member, Section):
                c[name] = member.config()
            elif isinstance(member.default, dict):
                c[name] = ConfigDict(member.default)
            elif member.default is None:
                c[name] = placeholder(member.kind)
            else:
                c[name] = member.default
        return c


@functools.cache
def base_fields() -> dict[str, Field]:
    """Return {dotted name: Field} of configs/base.py."""
    # Loaded by path, since a user's own folder may also be named configs.
    path = ROOT / "configs" / "base.py"
    module_spec = importlib.util.spec_from_file_location("rsearch_base_config", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return dict(module.FIELDS.items())


def at_least(low: float) -> Bound:
    """Return the bound of numbers that are at least `low`."""
    return Bound(lambda x: x >= low, f"a finite number >= {low}")


def above(low: float) -> Bound:
    """Return the bound of numbers greater than `low`."""
    return Bound(lambda x: x > low, f"a finite number > {low}")


def between(low: float, high: float) -> Bound:
    """Return the bound of numbers from `low` to `high`, both included."""
    return Bound(lambda x: low <= x <= high, f"a number from {low} to {high}")


def between_exclusive(low: float, high: float) -> Bound:
    """Return the bound of numbers between `low` and `high`, both excluded."""
    description = f"a number between {low} and {high}, both excluded"
    return Bound(lambda x: low < x < high, description)


def from_below(low: float, high: float) -> Bound:
    """Return the bound of numbers from `low` (included) to `high` (excluded)."""
    return Bound(lambda x: low <= x < high, f"a number from {low}, below {high}")


def up_to(low: float, high: float) -> Bound:
    """Return the bound of numbers from `low` (excluded) to `high` (included)."""
    return Bound(lambda x: low < x <= high, f"a number above {low} and at most {high}")


def multiple_of(unit: int, description: str) -> Bound:
    """Return the bound of positive multiples of `unit`."""
    return Bound(lambda x: x >= unit and x % unit == 0, description)


def or_value(value: Any, bound: Bound) -> Bound:
    """Return a bound that allows one more value, such as None or 0."""
    return Bound(
        lambda x: x == value or (x is not None and bound.allows(x)),
        f"{value!r}, or {bound.description}",
    )


def one_of(words: Sequence[str]) -> Bound:
    """Return the bound that allows exactly these words."""
    return Bound(lambda x: x in words, "one of " + ", ".join(map(repr, words)))


def some_of(words: Sequence[str], *, may_be_empty: bool = False) -> Bound:
    """Return the bound of sequences of these words without repetition."""

    def allows(x):
        is_long_enough = may_be_empty or len(x) > 0
        return is_long_enough and len(x) == len(set(x)) and set(x) <= set(words)

    amount = "any" if may_be_empty else "some"
    return Bound(allows, f"each once, {amount} of " + ", ".join(map(repr, words)))


def text_with(*marks: str) -> Bound:
    """Return the bound of None and of texts that contain all these marks."""
    return Bound(
        lambda x: x is None or all(mark in x for mark in marks),
        f"a text that holds {' and '.join(marks)}",
    )


def matching(pattern: str, description: str) -> Bound:
    """Return the bound of sequences whose items all match a regular expression."""
    return Bound(lambda x: all(re.fullmatch(pattern, item) for item in x), description)


def words_or_reference(words: Sequence[str]) -> Bound:
    """Return the bound of these words and of references to the user's functions."""
    description = ", ".join(map(repr, words))
    prefix = f"one of {description}, or" if len(words) > 1 else f"{description} or"
    return Bound(lambda x: x in words or is_reference(x), f"{prefix} {SPELLING}")
