"""Compile a chat template, and render it within bounds.

A chat template is a Jinja program that comes with a model, so its author may be
anyone. Jinja's sandbox keeps it away from Python, but lets it run and allocate without
limit. Here every loop, call, filter and operator is counted, and bounds are put on the
size of a value and on the output and the time of a rendering. The bounds are far above
what published templates need, and grow with the length of the chat.
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
MAX_OUTPUT = 1 << 24  # characters that a rendering writes, including its macros
MAX_SECONDS = 2.0  # of the thread's processor time, from the first reading of the clock
GROWTH = 16  # what a bound gains with each character of the chat
STEPS = 16  # steps before the first reading of the clock, and between two readings

# Methods and filters whose result may be larger than all their arguments together.
_GROWING_FUNCTIONS = {
    *("batch", "center", "expandtabs", "format", "format_map", "indent", "join"),
    *("ljust", "replace", "rjust", "slice", "sum", "to_bytes", "tojson", "translate"),
    *("xmlattr", "zfill"),
}
# A format whose field widths are arguments, such as '%*d' or '{:{}}'.
_WIDTHS = re.compile(r"%[^%a-zA-Z]*\*|\{[^{}]*:[^{}]*\{")
# Jinja filters that no chat template can need: those that are random, because a prompt
# must not differ from run to run, and those that take quadratic time.
_EXCLUDED_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap")
# Tuples, because `isinstance` is slow for unions and for abstract classes.
_TEXTS = (str, bytes)
_NUMBERS = (int, float)
_COLLECTIONS = (list, tuple, set, frozenset)
_MAPPINGS = (dict, Mapping)


class TemplateBoundError(jinja2.TemplateError):
    """A rendering runs or allocates beyond its bounds."""


class ChatTemplate:
    """A compiled chat template.

    It provides what transformers provides to templates: `raise_exception`,
    `strftime_now`, `tojson` without HTML escapes, loop controls and {% generation %}
    blocks. The current date is a fixed one, so that prompts do not differ from run to
    run.

    Args:
        source: source text of the template.

    Raises:
        ValueError: the template does not parse, or is longer than MAX_SOURCE.
    """

    def __init__(self, source: str):
        if len(source) > MAX_SOURCE:
            raise ValueError(f"it has {len(source)} characters, more than {MAX_SOURCE}")
        environment = _Environment()
        environment.meter.start(len(source))  # the compiler computes constants
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # including RecursionError and MemoryError
            raise ValueError(f"it does not parse: {_line(error)}") from error
        # Each rendering copies the globals, which is slow where they chain dicts.
        self._template.globals = dict(self._template.globals)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return what the template writes.

        Raises:
            ValueError: the template raises an exception or exceeds its bounds.
        """
        meter = self._template.environment.meter
        try:
            meter.start(_weigh(variables, float("inf")))
            return self._template.render(variables)
        except REQUESTS:
            raise
        except BaseException as error:  # the template is untrusted code
            raise ValueError(_line(error)) from error


def _line(error: Exception) -> str:
    """Return an error's message on one line, or its type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


class _Meter(threading.local):
    """The remaining bounds of this thread's rendering."""

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
            TemplateBoundError: the rendering writes too much or runs too long.
        """
        self.output -= num_characters
        if self.output < 0:
            raise TemplateBoundError(f"it writes more than {MAX_OUTPUT} characters")
        self.steps -= 1
        if self.steps < 0:
            self.steps = STEPS
            seconds = time.thread_time()
            if self.deadline is None:
                self.deadline = seconds + MAX_SECONDS
            elif seconds > self.deadline:
                raise TemplateBoundError(f"it runs for more than {MAX_SECONDS:g} s")

    def check_size(self, size: float, name: str) -> None:
        """Refuse a value that may have more than `max_value` characters or elements."""
        if size > self.max_value:
            raise TemplateBoundError(
                f"{name} makes a value of more than {MAX_VALUE} characters"
            )

    def check(self, value: Any, name: str) -> Any:
        """Return a value unless it is too large; count a generator as it runs."""
        if isinstance(value, types.GeneratorType):
            return self._generate(value, name)
        is_text = isinstance(value, str)
        size = len(value) if is_text else _weigh(value, self.max_value)
        self.steps -= size >> 10  # processing large values takes time
        self.check_size(size, name)
        return value

    def _generate(self, values: Iterator, name: str) -> Iterator:
        size = 0
        for value in values:
            size += _weigh(value, self.max_value)
            self.check_size(size, name)
            yield value

    def check_product(self, values: tuple, settings: Mapping, name: str) -> None:
        """Refuse a call whose result may be large although its arguments are not.

        The result of such functions (`replace`, `center`, `indent`) is at most as large
        as the product of the sizes of their arguments, where a number counts with its
        value.
        """
        values = (*values, *settings.values())
        formats = (v for v in values if isinstance(v, str))
        has_widths = any(_WIDTHS.search(v) for v in formats)
        size = 1
        for value in values:
            size *= 1 + _extent(value, self.max_value, has_widths)
            self.check_size(size, name)


def _weigh(value: Any, limit: float, by_value: bool = False) -> int:
    """Return the approximate bytes of a value, including the values inside it.

    A nested value counts each time it is reached, since printing, comparing and hashing
    reach it as often. Counting stops beyond the limit.

    Args:
        value: any value.
        limit: size beyond which counting stops.
        by_value: whether a number counts with its value instead of its digits.
    """
    if isinstance(value, str):
        return 8 + len(value)
    size, pending_values = 0, [value]
    while pending_values and size <= limit:
        value = pending_values.pop()
        size += 8  # a reference
        if isinstance(value, _TEXTS):
            size += len(value)
        elif isinstance(value, int):
            size += abs(value) if by_value else value.bit_length() >> 6
        elif isinstance(value, _COLLECTIONS):
            pending_values.extend(value)
        elif isinstance(value, _MAPPINGS):
            pending_values.extend(value.keys())
            pending_values.extend(value.values())
    return size


def _extent(value: Any, limit: float, by_value: bool = False) -> int:
    """Return a value's size as a factor of a product; field widths in a text count."""
    if isinstance(value, int):
        return abs(value)
    if isinstance(value, str) and len(value) <= limit:
        return len(value) + sum(int(n[:18]) for n in re.findall("[0-9]{4,}", value))
    return _weigh(value, limit, by_value)


def _list_generators(values: tuple) -> tuple:
    """Return arguments with generators as lists, so that they can be measured."""
    return tuple(list(v) if isinstance(v, types.GeneratorType) else v for v in values)


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text; here the block is only rendered."""

    tags = {"generation"}  # noqa: RUF012 - as in jinja2.ext.Extension

    def parse(self, parser):
        """Return the block's content in a call block, as transformers scopes it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_render_block")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render_block(self, caller):
        return caller()


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with everything counted that can grow or repeat."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # The optimizer would apply filters to constants at compile time.
            optimized=False,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=self._finalize,
            cache_size=0,
        )
        self.meter = _Meter()
        self.filters = {
            name: self._counted(name, function)
            for name, function in {**self.filters, "tojson": _tojson}.items()
            if name not in _EXCLUDED_FILTERS
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
        """Count a value that is written, and return it unchanged."""
        self.meter.check(value, "a text")
        self.meter.step(len(value) if isinstance(value, str) else 0)
        return value

    def _counted(self, name, function):
        multiplies = name in _GROWING_FUNCTIONS
        num_passed = getattr(function, "jinja_pass_arg", None) is not None

        @functools.wraps(function)  # also copies the mark of what Jinja passes first
        def call(*values, **settings):
            self.meter.step()
            if multiplies:
                values = _list_generators(values)
                self.meter.check_product(values[num_passed:], settings, name)
            return self.meter.check(function(*values, **settings), name)

        return call

    def call(self, context, function, *values, **settings):
        """Call a function or method named by the template."""
        if getattr(function, "__self__", None) is self:  # put there by `_count_blocks`
            return function(*values)
        self.meter.step()
        name = getattr(function, "__name__", type(function).__name__)
        if name in _GROWING_FUNCTIONS:
            values = _list_generators(values)
            # The sandbox wraps `str.format`.
            method = getattr(function, "__wrapped__", function)
            owner = getattr(method, "__self__", None)
            self.meter.check_product((owner, *values), settings, name)
        result = super().call(context, function, *values, **settings)
        return self.meter.check(result, name)

    def call_binop(self, context, operator, first, second):
        """Return the result of an operator whose result may be large."""
        are_numbers = isinstance(first, _NUMBERS) and isinstance(second, _NUMBERS)
        limit = self.meter.max_value
        if operator == "+":
            size = 0 if are_numbers else _weigh(first, limit) + _weigh(second, limit)
        elif operator == "%":
            size = 0
            if isinstance(first, str):
                by_value = bool(_WIDTHS.search(first))
                extent = _weigh(second, limit, by_value)
                size = (1 + _extent(first, limit)) * (1 + extent)
        elif not are_numbers:
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
        """Count a pass through a loop or macro with this many literal characters."""
        self.meter.step(num_characters)
        return ""

    def join_counted(self, *values):
        """Return the concatenation of values, the result of `~`."""
        self.meter.step()
        for value in values:
            self.meter.check(value, "'~'")
        return self.meter.check("".join(map(str, values)), "'~'")

    def check_literal(self, value):
        """Count and return a list, tuple or dict that the template builds."""
        self.meter.step()
        return self.meter.check(value, "a list")


def _count_blocks(tree: nodes.Template) -> None:
    """Make a template's program call the environment wherever it grows or repeats.

    Each pass through a loop or macro is counted; the results of `~` and the lists that
    the program builds are measured.
    """
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        num_characters = sum(
            len(text.data) for text in node.find_all(nodes.TemplateData)
        )
        count_call = _call("count_step", [nodes.Const(num_characters)])
        node.body = [nodes.ExprStmt(count_call).set_lineno(node.lineno), *node.body]
    _measure_literals(tree)


def _measure_literals(node: nodes.Node) -> None:
    """Replace concatenations and literal containers below a node by measured ones."""
    for child in node.iter_child_nodes():
        _measure_literals(child)
    for field, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_wrap_measured(item) for item in value]
        else:
            setattr(node, field, _wrap_measured(value))


def _wrap_measured(node):
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
    """Return a value as JSON without HTML escapes, as transformers does."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
