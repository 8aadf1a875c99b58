"""A tool: the policy writes <calculator> 1912 + 7 </calculator> and is shown 1919.

A tool is made from the run's resources, such as `resources.search`, and answers a batch
of calls. It answers a wrong call in words. `ToolResult(error=...)` ends a rollout
without a reward; an exception ends the run.
"""

import ast
import operator

from rsearch.types import ToolResult

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value_of(node):
    """Return the value of an expression with the four operators."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    operate = OPERATORS[type(node.op)]
    return operate(value_of(node.left), value_of(node.right))


def calculator(resources):
    """Return the tool, which has the name of this function."""

    def answer(call):
        try:
            return str(value_of(ast.parse(call.arguments[0].strip(), mode="eval").body))
        except Exception:
            return "Write a sum such as 1912 + 7."

    return lambda calls: [ToolResult(text=answer(call)) for call in calls]
