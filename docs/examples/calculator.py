"""A tool: the policy writes <calculator> 1912 + 7 </calculator> and is shown 1919.

A tool is made from the run's resources, `resources.search` among them, and answers a
batch of calls. A wrong call is answered in words; an error is raised only where nothing
could be answered, and `ToolResult(error=...)` ends a rollout without a reward.
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
    """Return the number that an expression of four operators stands for."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    operate = OPERATORS[type(node.op)]
    return operate(value_of(node.left), value_of(node.right))


def calculator(resources):
    """Return the tool, whose name is that of this function."""

    def answer(call):
        try:
            return str(value_of(ast.parse(call.arguments[0].strip(), mode="eval").body))
        except Exception:
            return "Write a sum such as 1912 + 7."

    return lambda calls: [ToolResult(text=answer(call)) for call in calls]
