"""Write configs/FIDELITY.md, which compares papers, public code and this package.

    python -m rsearch.fidelity           writes the page
    python -m rsearch.fidelity --check   fails if the page is not current

configs/fidelity/*.toml describes papers and public code, one [[rule]] for each row of
the page. Our side is computed from the recipes, by default and with `parity`.
"""

import functools
import inspect
import sys
import tomllib
from collections.abc import Sequence
from typing import NamedTuple

from rsearch.config import recipes as configuration
from rsearch.config.stage_plan import stage_configs
from rsearch.methods.table import METHODS
from rsearch.protocols.table import PROTOCOLS
from rsearch.rewards.terms import TERMS

FOLDER = configuration.ROOT / "configs"
PAGE = FOLDER / "FIDELITY.md"
SYSTEMS = (  # in the page's order: file of rules, heading
    ("search_r1", "Search-R1"),
    ("rag_r1", "RAG-R1"),
    ("r1_searcher", "R1-Searcher"),
    ("r1_searcher_pp", "R1-Searcher++"),
    ("r_search", "R-Search"),
    ("rearag", "ReaRAG"),
    ("evaluation", "Evaluation"),
    ("methods", "Evaluation methods"),
)
LISTS = ("fields", "lists", "held")  # keys whose values are lists
PROTOCOL = "protocol:"  # prefix of an attribute of the recipe's protocol value
METHOD = "method:"  # prefix of "<name>.<setting>" of an evaluation method
ABSENT = "-"
HEAD = """\
# Fidelity

Written by `python -m rsearch.fidelity`; a test keeps it current. Each row is a rule:
what the paper says, what the public code does where it is known to differ, and what we
do by default and under the recipe's word `parity`, both computed from the recipe. A
field is `config.<field>` of the stage named in the row, `reward.<term>.<setting>`, an
attribute of the protocol value, or `method:<name>.<setting>` with its default. If we do
not follow the public code, the row gives the reason. Rows about evaluation end with
what verifies them: a test, or the command that measures as the row says. "D n" and
"S n" refer to the two numbered lists at the end.
"""


class Rule(NamedTuple):
    """One row of the page.

    Attributes:
        paper: what the paper says; "-" if it is silent.
        code: what the public code does; "as the paper", or "-" if there is none.
        fields: field names as explained in HEAD; () if no field decides the rule.
        variant: words of the recipe's variant, such as "grpo"; "" is the default.
        stage: stage whose configuration counts; "" is the only or the last one.
        same: parity changes nothing, so that no field is meant to differ.
        why: notes for the reader, such as why the code is not followed.
        lists: entries of the lists of known differences, such as "D 3".
        recipe: recipe whose fields are shown; "" is the system's.
        held: tests and commands that verify what the row says about our side.
    """

    rule: str
    paper: str
    code: str
    fields: tuple[str, ...] = ()
    variant: str = ""
    stage: str = ""
    same: bool = False
    why: str = ""
    lists: tuple[str, ...] = ()
    recipe: str = ""
    held: tuple[str, ...] = ()


def read_rules(system: str) -> list[Rule]:
    """Return the rules of a system, in the file's order.

    Raises:
        ValueError: a rule has an unknown key or lacks a required one.
    """
    path = FOLDER / "fidelity" / f"{system}.toml"
    rules = []
    for number, entry in enumerate(tomllib.loads(path.read_text())["rule"], 1):
        if not {"rule", "paper", "code"} <= {*entry} <= {*Rule._fields}:
            raise ValueError(f"{path}: rule {number} has the keys {sorted(entry)}")
        lists = {key: tuple(entry.get(key, ())) for key in LISTS}
        rules.append(Rule(**entry | lists))
    return rules


def value_of(system: str, rule: Rule, field: str, *, parity: bool):
    """Return the value of a rule's field in the recipe, or ABSENT.

    Raises:
        ValueError: there is no such field or setting.
    """
    if field.startswith(METHOD):
        name, _, setting = field.removeprefix(METHOD).partition(".")
        return _default(METHODS[name], f"the method {name}", setting)
    words = [w for w in (rule.variant, "parity" if parity else "") if w]
    spec = f"configs/{rule.recipe or system}.py"
    spec += f":{','.join(words)}" if words else ""
    stages = _load_stages(spec)
    if field == "stages":
        return list(stages)
    if rule.stage and rule.stage not in stages:
        return ABSENT
    config = stages[rule.stage] if rule.stage else list(stages.values())[-1]
    if field.startswith(PROTOCOL):
        return getattr(PROTOCOLS[config.protocol.name], field.removeprefix(PROTOCOL))
    if field.startswith("reward."):
        return _setting(config.reward.to_dict(), field.removeprefix("reward."))
    configuration.check_known(config, field)
    node = config
    for key in field.split("."):
        node = node[key]
    return node


@functools.cache
def _load_stages(spec):
    """Return {stage: configuration} of a recipe, which callers must not modify."""
    return dict(stage_configs(configuration.load(spec)))


def _setting(reward, name):
    """Return the value of '<term>' or '<term>.<setting>' in a recipe's reward."""
    term, _, setting = name.partition(".")
    if term not in reward:
        return ABSENT
    if not setting:
        return "on"
    if setting == "weight":  # every term has one, its factor in the sum
        return reward[term].get(setting, 1.0)
    default = _default(TERMS[term], f"the reward term {term}", setting)
    return reward[term].get(setting, default)


def _default(function, name, setting):
    """Return the default of a function's setting."""
    parameters = inspect.signature(function).parameters
    if setting not in parameters:
        raise ValueError(f"{name} has no setting {setting!r}")
    return parameters[setting].default


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    indexed: dict[str, list[str]] = {}
    for system, title in SYSTEMS:
        rows = ["| rule | paper | public code | field | ours | `parity` |", "|---" * 6]
        rows[1] += "|"
        for rule in read_rules(system):
            rows.append(_row(system, rule))
            for entry in rule.lists:
                rule_name = rule.rule if rule.recipe else f"{title}: {rule.rule}"
                indexed.setdefault(entry, []).append(rule_name)
        parts.append(f"## {title}\n\n" + "\n".join(rows) + "\n")
    parts.append(_lists(indexed))
    return "\n".join(parts)


def _row(system, rule):
    """Return one line of the table."""
    default_values = [
        _text(value_of(system, rule, f, parity=False)) for f in rule.fields
    ]
    parity_values = [_text(value_of(system, rule, f, parity=True)) for f in rule.fields]
    if default_values == parity_values:
        parity_values = ["the same"] if rule.fields else []
    words = ", ".join(w for w in (rule.stage, rule.variant and f":{rule.variant}") if w)
    title = f"{rule.rule} ({words})" if words else rule.rule
    fields = [f"`{name}`" for name in rule.fields] or ["none"]
    notes = [
        *default_values,
        *filter(None, [rule.why]),
        *(f"`{text}`" for text in rule.held),
    ]
    cells = [[title], [rule.paper], [rule.code], fields, notes, parity_values]
    return "| " + " | ".join(_cell(lines or [ABSENT]) for lines in cells) + " |"


def _text(value):
    """Return the text with which the page shows a value."""
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "''"


def _cell(lines):
    """Return the lines as one Markdown table cell, with | and < escaped."""
    texts = (" ".join(line.split()) for line in lines)
    texts = (line.replace("|", "\\|").replace("<", "&lt;") for line in texts)
    return "<br>".join(texts)


def read_lists() -> dict[str, str]:
    """Return {"D 1": description} of the entries of both lists, in their order."""
    path = FOLDER / "fidelity" / "lists.toml"
    return {
        f"{letter} {number}": text
        for letter, texts in tomllib.loads(path.read_text()).items()
        for number, text in enumerate(texts, 1)
    }


def _lists(indexed):
    """Return the table of the two lists' entries, each with the rows that settle it."""
    rows = ["## The known differences (D) and switches (S)", ""]
    rows += ["| entry | what | rows |", "|---|---|---|"]
    for entry, description in read_lists().items():
        cells = ([entry], [description], indexed.get(entry, [ABSENT]))
        rows.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(rows) + "\n"


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ValueError: with --check, the page differs from what the recipes now give.
    """
    flags = {"check": (False, "write nothing, and fail if the page is not current")}
    values = configuration.parse_flags(argv, flags=flags)
    text = page()
    if not values["check"]:
        PAGE.write_text(text)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        raise ValueError(f"{PAGE} is not current: run python -m rsearch.fidelity")
    return 0


if __name__ == "__main__":
    sys.exit(configuration.run_command(main))
