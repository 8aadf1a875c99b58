"""Read from XLA's text what a compiled program moves, and which kernels it calls.

XLA's own analysis counts the body of a loop once. Here it counts as often as it runs.
That number is XLA's known trip count, or the constant that the loop's condition
compares with, or, if it depends on the data, a number that the caller passes.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

ITEM_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
    **dict.fromkeys(("f64", "s64", "u64"), 8),
}
COMPUTATION = re.compile(r"(?:ENTRY )?%([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.-]+) = (.*)$")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
NAME = re.compile(r"%([\w.-]+)")
CALLED = re.compile(
    r"(?:calls|body|branch_computations|true_computation|false_computation|"
    r"called_computations)=(\{[^}]*\}|%[\w.-]+)"
)
CONDITION = re.compile(r"condition=%([\w.-]+)")
APPLIED = re.compile(r"to_apply=%([\w.-]+)")  # the computation that a call runs
KNOWN_LENGTH = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
TARGET = re.compile(r'custom_call_target="([^"]+)"')
FUSED_BY = re.compile(
    r'"fusion_backend_config":\{"kind":"(?:__custom_fusion","custom_fusion_config":'
    r'\{"name":")?([^"]+)"'
)
LIBRARIES = {  # prefix of a kernel's name in XLA's text -> its common name
    "__cublas$": "cuBLAS matmul",
    "__cudnn$fmha": "cuDNN attention",
    "__cudnn$": "cuDNN",
    "__triton_gemm": "Triton matmul",
    "__triton_nested_gemm": "Triton matmul",
    "__triton": "Triton fusion",
    "__cub$": "CUB",
}
FUSION = "XLA fusion"
# The last element of the tuple that a library call returns.
WORKSPACE = re.compile(r", (s8\[\d+\](?:\{0\})?)\)$")
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
NO_TRAFFIC_OPS = {  # operations that move nothing themselves
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota"),
    *("while", "conditional", "call", "partition-id", "replica-id", "after-all"),
}


PAGED = "paged_attention"  # the kernel that fetches pages by a table
IN_PLACE = ("dynamic-update-slice", "scatter")  # update their first operand


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    operand_text: str
    attributes: str
    is_root: bool


class Traffic(NamedTuple):
    """Bytes moved on each device.

    Attributes:
        memory: bytes read from and written to its main memory.
        links: {collective: (number of calls, bytes sent)}.
    """

    memory: float
    links: dict[str, tuple[float, float]]

    @property
    def sent(self) -> float:
        """Return the bytes sent to other devices."""
        return sum(size for _, size in self.links.values())


def scaled(moved_once: Traffic, factor: float) -> Traffic:
    """Return what `factor` calls move."""
    links = {
        op: (n * factor, size * factor) for op, (n, size) in moved_once.links.items()
    }
    return Traffic(moved_once.memory * factor, links)


def moved(text: str, *, rounds: float = 1) -> Traffic:
    """Return the bytes that a compiled program moves in one call, at most.

    Args:
        rounds: rounds of each loop whose length depends on the data.
    """
    program, entry = read(text)
    return _Reader(program, rounds).computation(entry)


def read(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Return {computation: {name: Instruction}}, and the name of the entry."""
    program, entry, body = {}, None, None
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            body = program.setdefault(match[1], {})
            if line.startswith("ENTRY"):
                entry = match[1]
        elif body is not None and (match := INSTRUCTION.match(line)):
            instruction = _instruction(match[2], match[3], is_root=bool(match[1]))
            body[instruction.name] = instruction
        elif line.startswith("}"):
            body = None
    return program, entry


def _instruction(name, text, *, is_root):
    shape, text = _balanced(text) if text[0] == "(" else text.split(" ", 1)
    op, _, text = text.strip().partition("(")
    operand_text, attributes = _balanced("(" + text)
    operands = tuple(NAME.findall(operand_text))
    return Instruction(
        name, shape, op, operands, operand_text[1:-1], attributes, is_root
    )


def _balanced(text):
    """Return the part in parentheses that a text begins with, and the rest."""
    depth = 0
    for i, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if not depth:
            return text[: i + 1], text[i + 1 :]
    raise ValueError(f"not a line of XLA's text: {text[:80]}")


def array_bytes(shape: str, *, in_memory: bool = True) -> float:
    """Return the bytes of a shape; for a tuple, their sum.

    Args:
        shape: a shape such as "f32[8,128]{1,0:T(8,128)}".
        in_memory: leave out arrays in a memory other than the main one ("S(1)").
    """
    total = 0.0
    for kind, sizes, layout in ARRAY.findall(shape):
        if kind in ITEM_BYTES and not (in_memory and re.search(r"S\([1-9]", layout)):
            numbers = [int(n) for n in sizes.split(",") if n]
            total += ITEM_BYTES[kind] * math.prod(numbers)
    return total


def kernels(text: str, *, rounds: float = 1) -> dict[str, float]:
    """Return {kernel: how often one call of a compiled program runs it}, by name.

    A library's matrix products, attention, custom kernels and collectives have their
    own names; all other fused loops share one. All branches of a conditional count.

    Args:
        rounds: see `moved`.
    """
    program, entry = read(text)
    counts: collections.Counter = collections.Counter()
    for times, i in _Reader(program, rounds).all_instructions(entry):
        base = i.op.removesuffix("-start")
        fused_by, target = FUSED_BY.search(i.attributes), TARGET.search(i.attributes)
        if i.op == "fusion":
            counts[_kernel_name(fused_by[1]) if fused_by else FUSION] += times
        elif i.op == "custom-call" and target:
            counts[_kernel_name(target[1])] += times
        elif base in COLLECTIVES:
            counts[base] += times
    return dict(counts)


def _kernel_name(name):
    """Return the common name of a kernel."""
    names = (title for prefix, title in LIBRARIES.items() if name.startswith(prefix))
    return next(names, name)


class _Reader:
    """Adds up what the instructions of one program move."""

    def __init__(self, program, rounds):
        self.program, self.rounds, self.known = program, rounds, {}

    def computation(self, name) -> Traffic:
        """Return what all instructions of a computation move."""
        if name not in self.known:
            parts_moved = [
                self.instruction(name, i) for i in self.program[name].values()
            ]
            self.known[name] = _sum(parts_moved)
        return self.known[name]

    def all_instructions(self, name, times=1.0) -> Iterator[tuple[float, Instruction]]:
        """Yield (how often it runs, instruction) of a computation and all it calls."""
        for i in self.program[name].values():
            yield times, i
            length = self.length(i) if i.op == "while" else 1.0
            if i.op in ("while", "conditional", "call", "async-start"):
                for called in self._called(i):
                    yield from self.all_instructions(called, times * length)

    def _called(self, i) -> list[str]:
        """Return the computations that an instruction calls; for a loop, its body."""
        called = [
            n for text in CALLED.findall(i.attributes) for n in NAME.findall(text)
        ]
        if i.op == "call" and not called:
            called = APPLIED.findall(i.attributes)
        return called

    def instruction(self, computation, i) -> Traffic:
        """Return what an instruction moves, including what it calls."""
        called = self._called(i)
        if i.op == "while":
            return scaled(self.computation(called[0]), self.length(i))
        if i.op == "conditional":
            return max(map(self.computation, called), key=lambda m: (m.memory, m.sent))
        if i.op in ("call", "async-start"):
            return _sum(map(self.computation, called))
        base = i.op.removesuffix("-start")
        if i.op.endswith("-done") or i.op in NO_TRAFFIC_OPS:
            return Traffic(0.0, {})
        if base in COLLECTIVES:
            return self._collective(computation, base, i)
        if i.op == "fusion":
            return Traffic(self._fusion(computation, i, called[0]), {})
        return Traffic(self._array_bytes(computation, i), {})

    def length(self, loop) -> float:
        """Return how often the body of a loop runs."""
        if match := KNOWN_LENGTH.search(loop.attributes):
            return float(match[1])
        body = self.program[CONDITION.search(loop.attributes)[1]]
        root = next(i for i in body.values() if i.is_root)
        if root.op == "compare" and "direction=LT" in root.attributes:
            last = body.get(root.operands[-1])
            if last is not None and last.op == "constant":
                return float(last.operand_text)
        return self.rounds

    def _shape(self, computation, name):
        instruction = self.program[computation].get(name)
        return instruction.shape if instruction else ""

    def _operands(self, computation, i, *, in_memory=True):
        shapes = [self._shape(computation, name) for name in i.operands]
        return [array_bytes(shape, in_memory=in_memory) for shape in shapes]

    def _collective(self, computation, op, i):
        in_bytes = sum(self._operands(computation, i, in_memory=False))
        out_bytes = array_bytes(i.shape, in_memory=False)
        if i.op.endswith("-start"):  # its shape is (operands, results, ...)
            out_bytes = max(out_bytes - in_bytes, 0.0)
        # In a ring, an all-reduce is a reduce-scatter followed by an all-gather.
        size = {"all-reduce": 2 * in_bytes, "all-gather": out_bytes}.get(op, in_bytes)
        return Traffic(0.0, {op: (1.0, size)})

    def _array_bytes(self, computation, i):
        """Return the bytes that an instruction other than a fusion moves."""
        operands, out = self._operands(computation, i), array_bytes(i.shape)
        if i.op in ("dynamic-slice", "slice", "gather"):
            return 2 * out
        if i.op == "dynamic-update-slice":
            return 2 * operands[1]
        if i.op in ("copy-start", "slice-start", "dynamic-slice-start"):
            # The shape is (target, source, ...), of which the smaller one is moved, or
            # ((source, indices), target, ...), of which only the target counts, since
            # the indices are smaller still.
            is_nested = i.shape.startswith("((")
            shape = _balanced(i.shape[1:])[1] if is_nested else i.shape
            sizes = [
                array_bytes(array[0], in_memory=False)
                for array in ARRAY.finditer(shape)
            ]
            return min(filter(None, sizes[: 1 if is_nested else 2]), default=0.0)
        if i.op == "custom-call" and PAGED in i.attributes:
            return self._paged(computation, i, operands) + out
        if i.op == "custom-call":  # without the workspace, which need not be written
            out -= sum(map(array_bytes, WORKSPACE.findall(i.shape)))
        return sum(operands) + out

    def _paged(self, computation, i, operands):
        """Return the bytes a kernel reads; of pages, only those its table can name."""
        shapes = [ARRAY.match(self._shape(computation, name)) for name in i.operands]
        dims = [[int(n) for n in shape[2].split(",") if n] for shape in shapes]
        pages = max(math.prod(d) for shape, d in zip(shapes, dims) if shape[1] == "s32")
        return sum(
            size if len(d) != 4 or shape[1] == "f32" else size * min(1, pages / d[1])
            for shape, d, size in zip(shapes, dims, operands)
        )

    def _fusion(self, computation, i, called):
        """Return the bytes that a fusion moves; of sliced operands, only the slices."""
        total = 0.0
        for position, size in enumerate(self._operands(computation, i)):
            total += min(size, self._read_of(called, position))
        body = self.program[called]
        root = next(x for x in body.values() if x.is_root)
        return total + min(array_bytes(i.shape), self._written_by(body, root))

    def _read_of(self, called, position) -> float:
        """Return the most bytes that a fusion reads of one parameter."""
        body = self.program[called]
        names = [
            x.name
            for x in body.values()
            if x.op == "parameter" and x.operand_text == str(position)
        ]
        total = 0.0
        while names:
            name = names.pop()
            for user in body.values():
                for index, operand in enumerate(user.operands):
                    if operand != name:
                        continue
                    if _renames(user, index):
                        names.append(user.name)
                    elif user.op == "fusion":
                        inner = CALLED.search(user.attributes)[1].removeprefix("%")
                        total += self._read_of(inner, index)
                    elif user.op in ("dynamic-slice", "slice", "gather") and not index:
                        total += array_bytes(user.shape, in_memory=False)
                    elif user.op not in IN_PLACE or index:
                        # An operand updated in place is not read; others are, in full.
                        return math.inf
        return total

    def _written_by(self, body, root):
        """Return the bytes that a fusion writes."""
        if root.op in IN_PLACE:
            changes = root.operands[1 if root.op == "dynamic-update-slice" else 2]
            return array_bytes(body[changes].shape, in_memory=False)
        if root.op in ("bitcast", "reshape"):
            return self._written_by(body, body[root.operands[0]])
        if root.op == "tuple":
            return sum(self._written_by(body, body[name]) for name in root.operands)
        return array_bytes(root.shape, in_memory=False)


def _renames(user, index) -> bool:
    """Return whether an instruction is another name for its operand.

    A fusion within another may see the same bytes as tiles of another shape, which is
    how TPUs read 8-bit arrays.
    """
    is_aliased = (
        f"output_to_operand_aliasing={{{{}}: ({index}, {{}})}}" in user.attributes
    )
    return user.op in ("bitcast", "reshape") or (user.op == "fusion" and is_aliased)


def _sum(parts_moved):
    memory, links = 0.0, {}
    for item in parts_moved:
        memory += item.memory
        for op, (count, size) in item.links.items():
            totals = links.get(op, (0.0, 0.0))
            links[op] = (totals[0] + count, totals[1] + size)
    return Traffic(memory, links)
