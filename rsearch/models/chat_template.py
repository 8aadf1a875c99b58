"""Compile a chat template, and render it within bounds.

A chat template is a Jinja program that comes with a model, so its author may be
anyone. Jinja's sandbox keeps it away from Python, but lets it run and allocate without
end. Here every loop, call, filter and operator is counted: a value has a largest size,
a rendering a largest output and a time. The bounds are far above what published
templates need, and grow with the chat.
"""

import functools
import json
import re
import threading
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from rsearch.runtime.boundary import REQUESTS

MAX_SOURCE = 1 << 18  # characters of a template; published ones have up to 2 ** 15
MAX_VALUE = 1 << 20  # characters of a value; an element of a list counts as 8
MAX_OUTPUT = 1 << 24  # characters of all that a rendering writes, its macros included
MAX_SECONDS = 2.0  # of the thread's processor time, from the first look at the clock
GROWTH = 16  # what a bound gains with each character of the chat
STEPS = 16  # before the first look at the clock, and between two

# Methods and filters whose result may be larger than their arguments together.
_MULTIPLY = {
    *("batch", "center", "expandtabs", "format", "format_map", "indent", "join"),
    *("ljust", "replace", "rjust", "slice", "sum", "to_bytes", "tojson", "translate"),
    *("xmlattr", "zfill"),
}
# A format whose widths are arguments: '%*d', '{:{}}'.
_WIDTHS = re.compile(r"%[^%a-zA-Z]*\*|\{[^{}]*:[^{}]*\{")
# Names of Jinja that no chat template can need: random ones, for a prompt must not
# differ from run to run, and those that take quadratic time.
_LEFT_OUT = ("pprint", "random", "striptags", "urlize", "wordwrap")
# Tuples, as `isinstance` is slow for unions and for abstract classes.
_TEXTS = (str, bytes)
_NUMBERS = (int, float)
_COLLECTIONS = (list, tuple, set, frozenset)
_MAPPINGS = (dict, Mapping)


class TemplateBoundError(jinja2.TemplateError):
    """A rendering goes on, or allocates, beyond its bounds."""


class ChatTemplate:
    """A compiled chat template.

    It has what transformers gives to templates: `raise_exception`, `strftime_now`,
    `tojson` without HTML escapes, loop controls and {% generation %} blocks. Today's
    date is a fixed one, so that prompts do not differ from run to run.

    Args:
        source: of the template.

    Raises:
        ValueError: it does not parse, or is longer than MAX_SOURCE.
    """

    def __init__(self, source: str):
        if len(source) > MAX_SOURCE:
            raise ValueError(f"it has {len(source)} characters, more than {MAX_SOURCE}")
        environment = _Environment()
        environment.meter.start(len(source))  # the compiler computes constants
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # RecursionError and MemoryError, too
            raise ValueError(f"it does not parse: {_line(error)}") from error
        # Each rendering copies them, which takes long where they are a chain of dicts.
        self._template.globals = dict(self._template.globals)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return what the template writes.

        Raises:
            ValueError: it raises an exception, or does not keep its bounds.
        """
        meter = self._template.environment.meter
        try:
            meter.start(_weigh(variables, float("inf")))
            return self._template.render(variables)
        except REQUESTS:
            raise
        except BaseException as error:  # the template is somebody else's program
            raise ValueError(_line(error)) from error


def _line(error: Exception) -> str:
    """Return an error's message, or its type where it has none, as one line."""
    return " ".join(str(error).split()) or type(error).__name__


class _Meter(threading.local):
    """The bounds that the rendering of this thread has left."""

    def __init__(self):
        self.start(0)

    def start(self, num_characters: int) -> None:
        """Begin a rendering of a chat with this many characters."""
        self.max_value = MAX_VALUE + GROWTH * num_characters
        self.output = MAX_OUTPUT + GROWTH * num_characters
        self.deadline = None  # most renderings end before the clock is read
        self.steps = STEPS

    def step(self, num_characters: int = 0) -> None:
        """Count one step, which writes this many characters.

        Raises:
            TemplateBoundError: that is too much.
        """
        self.output -= num_characters
        if self.output < 0:
            raise TemplateBoundError(f"it writes more than {MAX_OUTPUT} characters")
        self.steps -= 1
        if self.steps < 0:
            self.steps = STEPS
            now = time.thread_time()
            if self.deadline is None:
                self.deadline = now + MAX_SECONDS
            elif now > self.deadline:
                raise TemplateBoundError(f"it runs for more than {MAX_SECONDS:g} s")

    def check_size(self, size: float, name: str) -> None:
        """Refuse a value that may have more than `max_value` characters or elements."""
        if size > self.max_value:
            raise TemplateBoundError(
                f"{name} makes a value of more than {MAX_VALUE} characters"
            )

    def check(self, value: Any, name: str) -> Any:
        """Return a value, if it is not too large; a generator is counted as it runs."""
        if isinstance(value, types.GeneratorType):
            return self._generate(value, name)
        is_text = isinstance(value, str)
        size = len(value) if is_text else _weigh(value, self.max_value)
        self.steps -= size >> 10  # large values take time
        self.check_size(size, name)
        return value

    def _generate(self, values: Iterator, name: str) -> Iterator:
        size = 0
        for value in values:
            size += _weigh(value, self.max_value)
            self.check_size(size, name)
            yield value

    def check_product(self, values: tuple, settings: Mapping, name: str) -> None:
        """Refuse a call whose result may be large though its arguments are not.

        The largest result of all these functions is the product of what they get, a
        number counting as much as its value: `replace`, `center`, `indent`.
        """
        values = (*values, *settings.values())
        formats = (v for v in values if isinstance(v, str))
        has_widths = any(_WIDTHS.search(v) for v in formats)
        size = 1
        for value in values:
            size *= 1 + _extent(value, self.max_value, has_widths)
            self.check_size(size, name)


def _weigh(value: Any, limit: float, by_value: bool = False) -> int:
    """Return about the bytes of a value, nested ones included.

    A value within another counts as often as it is reached, since printing, comparing
    and hashing reach it as often. Counting ends beyond the limit.

    Args:
        value: any.
        limit: beyond which nothing is counted.
        by_value: whether a number counts as much as its value, and not its digits.
    """
    if isinstance(value, str):
        return 8 + len(value)
    size, waiting = 0, [value]
    while waiting and size <= limit:
        value = waiting.pop()
        size += 8  # a reference
        if isinstance(value, _TEXTS):
            size += len(value)
        elif isinstance(value, int):
            size += abs(value) if by_value else value.bit_length() >> 6
        elif isinstance(value, _COLLECTIONS):
            waiting.extend(value)
        elif isinstance(value, _MAPPINGS):
            waiting.extend(value.keys())
            waiting.extend(value.values())
    return size


def _extent(value: Any, limit: float, by_value: bool = False) -> int:
    """Return the size of a value as a factor; a text's widths of fields count."""
    if isinstance(value, int):
        return abs(value)
    if isinstance(value, str) and len(value) <= limit:
        return len(value) + sum(int(n[:18]) for n in re.findall("[0-9]{4,}", value))
    return _weigh(value, limit, by_value)


def _settled(values: tuple) -> tuple:
    """Return arguments with generators run, so that what they yield can be measured."""
    return tuple(list(v) if isinstance(v, types.GeneratorType) else v for v in values)


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what the assistant writes; here it is only rendered."""

    tags = {"generation"}  # noqa: RUF012 - as in jinja2.ext.Extension

    def parse(self, parser):
        """Return the block's content in a call block, which is transformers' scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_render_block")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render_block(self, caller):
        return caller()


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which all that can grow or repeat is counted."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # The optimizer would compute filters of constants while it compiles.
            optimized=False,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=self._finalize,
            cache_size=0,
        )
        self.meter = _Meter()
        self.filters = {
            name: self._counted(name, function)
            for name, function in {**self.filters, "tojson": _tojson}.items()
            if name not in _LEFT_OUT
        }
        self.tests = {
            name: self._counted(name, function) for name, function in self.tests.items()
        }
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda _: "26 Jul 2024"

    def _parse(self, source, name, filename):
        tree = super()._parse(source, name, filename)
        _count_blocks(tree)
        return tree

    def _finalize(self, value):
        """Count what is written; the value itself is written as it is."""
        self.meter.check(value, "a text")
        self.meter.step(len(value) if isinstance(value, str) else 0)
        return value

    def _counted(self, name, function):
        multiplies = name in _MULTIPLY
        num_passed = getattr(function, "jinja_pass_arg", None) is not None

        @functools.wraps(function)  # also copies what Jinja passes first
        def call(*values, **settings):
            self.meter.step()
            if multiplies:
                values = _settled(values)
                self.meter.check_product(values[num_passed:], settings, name)
            return self.meter.check(function(*values, **settings), name)

        return call

    def call(self, context, function, *values, **settings):
        """Call a function or a method that the template names."""
        if getattr(function, "__self__", None) is self:  # put there by `_count_blocks`
            return function(*values)
        self.meter.step()
        name = getattr(function, "__name__", type(function).__name__)
        if name in _MULTIPLY:
            values = _settled(values)
            # The sandbox wraps `format`.
            method = getattr(function, "__wrapped__", function)
            owner = getattr(method, "__self__", None)
            self.meter.check_product((owner, *values), settings, name)
        result = super().call(context, function, *values, **settings)
        return self.meter.check(result, name)

    def call_binop(self, context, operator, first, second):
        """Return the result of an operator whose result may be large."""
        numbers = isinstance(first, _NUMBERS) and isinstance(second, _NUMBERS)
        limit = self.meter.max_value
        if operator == "+":
            size = 0 if numbers else _weigh(first, limit) + _weigh(second, limit)
        elif operator == "%":
            size = 0
            if isinstance(first, str):
                by_value = bool(_WIDTHS.search(first))
                extent = _weigh(second, limit, by_value)
                size = (1 + _extent(first, limit)) * (1 + extent)
        elif not numbers:
            size = (1 + _extent(first, limit)) * (1 + _extent(second, limit))
        elif isinstance(first, int) and isinstance(second, int):
            width = second if operator == "**" else second.bit_length() >> 6
            size = first.bit_length() * max(width, 0)
        else:
            size = 0
        self.meter.step()
        self.meter.check_size(size, repr(operator))
        return super().call_binop(context, operator, first, second)

    def count_step(self, num_characters):
        """Count a pass through a loop, or a macro; of this many literal characters."""
        self.meter.step(num_characters)
        return ""

    def join_counted(self, *values):
        """Return what `~` makes of values."""
        self.meter.step()
        for value in values:
            self.meter.check(value, "'~'")
        return self.meter.check("".join(map(str, values)), "'~'")

    def check_literal(self, value):
        """Return a list, tuple or dict that the template builds."""
        self.meter.step()
        return self.meter.check(value, "a list")


def _count_blocks(tree: nodes.Template) -> None:
    """Let the program of a template call the environment where it grows or repeats.

    Loops and macros count each pass; `~` and the lists it builds are measured.
    """
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        num_characters = sum(
            len(text.data) for text in node.find_all(nodes.TemplateData)
        )
        counted = _call("count_step", [nodes.Const(num_characters)])
        node.body = [nodes.ExprStmt(counted).set_lineno(node.lineno), *node.body]
    _measure_literals(tree)


def _measure_literals(node: nodes.Node) -> None:
    """Replace concatenations and literal containers below a node by measured ones."""
    for child in node.iter_child_nodes():
        _measure_literals(child)
    for field, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_measured(item) for item in value]
        else:
            setattr(node, field, _measured(value))


def _measured(node):
    if isinstance(node, nodes.Concat):
        return _call("join_counted", node.nodes)
    if isinstance(node, nodes.List | nodes.Dict):
        return _call("check_literal", [node])
    if isinstance(node, nodes.Tuple) and node.ctx == "load":
        return _call("check_literal", [node])
    return node


def _call(method, values):
    function = nodes.EnvironmentAttribute(method)
    return nodes.Call(function, values, [], None, None)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _tojson(
    value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
) -> str:
    """Return a value as JSON, as transformers does: without HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
