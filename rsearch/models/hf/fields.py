"""Read the fields of a config.json, and refuse values that are not supported."""

import dataclasses
import pathlib

MAX_NUMBER = {int: 2**31, float: 1e38}  # an int32 or float32 holds all smaller numbers


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of a config.json, or of an object inside it.

    Attributes:
        path: path of the file, for error messages.
        values: {field name: value}.
        prefix: name of the object inside the file, followed by a dot, for error
            messages.
    """

    path: pathlib.Path
    values: dict
    prefix: str = ""

    def get(self, name: str, default: object = None) -> object:
        """Return the value of a field, or `default` if it is absent."""
        return self.values.get(name, default)

    def number(
        self, name: str, kind: type = int, default: float | None = None
    ) -> int | float:
        """Return a number above zero, or `default` if the field is absent or null.

        Raises:
            ValueError: the field does not hold such a number.
        """
        value = default if self.values.get(name) is None else self.values[name]
        types = (int, float) if kind is float else (int,)
        if (
            not isinstance(value, types)
            or isinstance(value, bool)
            or not 0 < value < MAX_NUMBER[kind]
        ):
            expected = "a whole number" if kind is int else "a number"
            supported = f"it must be {expected} above 0 and below {MAX_NUMBER[kind]}"
            raise self.refusal(name, value, supported)
        return kind(value)

    def check(self, name: str, allowed: tuple) -> None:
        """Refuse a field unless it holds one of these values; 0 and False differ.

        Raises:
            ValueError: names the field, its value and what is allowed.
        """
        value = self.values.get(name)
        if not any(
            value == v and isinstance(value, bool) == isinstance(v, bool)
            for v in allowed
        ):
            choices = " or ".join("null" if v is None else repr(v) for v in allowed)
            raise self.refusal(name, value, f"it must be {choices}")

    def refusal(self, name: str, value: object, supported: str) -> ValueError:
        """Return the error that refuses a field's value."""
        return ValueError(
            f"{self.path}: {self.prefix}{name}={value!r} is not supported: {supported}"
        )
