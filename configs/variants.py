"""Parse the words after a recipe's colon, such as configs/rag_r1.py:sq,parity.

A recipe names its choices, each of which takes one word (by default the first), and its
flags, which are on if they are given.
"""

import types


def parse_variant(variant, *, choices=None, flags=(), clashes=()):
    """Parse the words of a variant.

    Args:
        variant: words separated by commas; "" takes the default of every choice.
        choices: {name: words}, of which one is taken, by default the first.
        flags: words that may be given or not.
        clashes: pairs of words that cannot both be given, apart from words of the same
            choice.

    Returns:
        A namespace with the word of each choice, and a bool for each flag.

    Raises:
        ValueError: an unknown word, one given twice, or two that exclude each other.
    """
    choices = choices or {}
    words = [word.strip() for word in variant.split(",")] if variant else []
    options = _describe_choices(choices, flags)
    owner = {word: name for name, group in choices.items() for word in group}
    owner |= dict.fromkeys(flags, None)
    words_by_choice = {name: group[0] for name, group in choices.items()}
    given_words = {}
    for word in words:
        if word not in owner:
            raise ValueError(f"unknown variant {word!r}: {options}")
        if words.count(word) > 1:
            raise ValueError(f"variant {word!r} is given twice")
        name = owner[word]
        if name in given_words and name is not None:
            raise ValueError(
                f"variants {given_words[name]!r} and {word!r} exclude each other: "
                f"{options}"
            )
        if name is not None:
            given_words[name] = words_by_choice[name] = word
    for first, second in clashes:
        if first in words and second in words:
            raise ValueError(f"variants {first!r} and {second!r} exclude each other")
    return types.SimpleNamespace(
        **words_by_choice, **{flag: flag in words for flag in flags}
    )


def _describe_choices(choices, flags):
    """Return the possible words, such as 'one of sq, mq; any of tiny, parity'."""
    parts = [f"one of {', '.join(group)}" for group in choices.values()]
    if flags:
        parts.append(f"any of {', '.join(flags)}")
    return "; ".join(parts) or "there are none"
