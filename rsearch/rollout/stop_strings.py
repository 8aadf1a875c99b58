"""Find stop strings inside the compiled loop, wherever token boundaries fall.

An Aho-Corasick automaton over the bytes of the stop strings is composed with the
vocabulary into one table [state, token] -> state, so that the decoding loop needs a
single gather for each token. The last state means "a stop string has been completed"
and is never left.
"""

from collections.abc import Sequence

import numpy as np


def byte_automaton(stops: Sequence[str]) -> np.ndarray:
    """Return [S, 256] uint8 transitions; state 0 is the start, S - 1 the final match.

    A state stands for the longest suffix of the bytes so far that is a proper prefix of
    a stop string. Source: Aho and Corasick 1975, with all matches merged into one
    state.

    Raises:
        ValueError: an empty stop string, or more than 255 states.
    """
    if any(not s for s in stops):
        raise ValueError(f"stop strings must be non-empty, got {list(stops)}")
    stop_bytes = [stop.encode("utf-8") for stop in stops]
    # The empty prefix is the start state, even if there are no stop strings.
    prefixes = sorted({b"", *(end[:n] for end in stop_bytes for n in range(len(end)))})
    match = len(prefixes)
    if match > 255:  # a state is a uint8
        raise ValueError(
            f"stop strings need {match} states, more than the 255 available"
        )
    state_by_prefix = {prefix: i for i, prefix in enumerate(prefixes)}
    table = np.zeros((match + 1, 256), np.uint8)
    table[match] = match
    for prefix, state in state_by_prefix.items():
        # Bytes that occur in no stop string lead back to the start.
        for byte in set(b"".join(stop_bytes)):
            text = prefix + bytes([byte])
            suffixes = (text[n:] for n in range(len(text) + 1))
            longest = next(suffix for suffix in suffixes if suffix in state_by_prefix)
            # A stop string that ends inside another one is complete there as well.
            is_match = text.endswith(tuple(stop_bytes))
            table[state, byte] = match if is_match else state_by_prefix[longest]
    return table


def token_automaton(stops: Sequence[str], token_bytes: Sequence[bytes]) -> np.ndarray:
    """Return [S, V] uint8, the state after each token; S - 1 is the final match.

    Args:
        stops: the strings to stop at; without any, nothing ever matches.
        token_bytes: [V] bytes that each token id stands for.
    """
    table = byte_automaton(stops)
    num_states = len(table)
    lengths = np.array([len(b) for b in token_bytes])
    states = np.tile(np.arange(num_states, dtype=np.uint8)[:, None], len(token_bytes))
    order = np.argsort(-lengths, kind="stable")
    remaining = order[: np.count_nonzero(lengths)]
    # All tokens advance together by one byte; each drops out when its bytes end.
    position = 0
    while len(remaining):
        column = np.array([token_bytes[i][position] for i in remaining], np.uint8)
        states[:, remaining] = table[states[:, remaining], column[None, :]]
        position += 1
        remaining = remaining[: np.count_nonzero(lengths[remaining] > position)]
    return states


class StopSets:
    """The automata of several sets of stop strings in one table of a fixed shape.

    Rows with different stop strings decode in one compiled program: each starts in the
    first state of its own set, and all sets share the last state, which is a match.

    Attributes:
        table: [256, V] uint8, the state after each token.
    """

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int):
        """Start without any set.

        Args:
            token_bytes: the bytes that each token id stands for.
            vocab_size: V, number of ids of the model; ids without a token leave the
                state as it is.
        """
        states = np.arange(256, dtype=np.uint8)[:, None]
        self.table = np.repeat(states, vocab_size, axis=1)
        self._token_bytes = token_bytes
        self._starts: dict[tuple[str, ...], int] = {}
        self._num_states = 0

    def first_state(self, stops: Sequence[str]) -> int:
        """Return the state in which a turn that stops at these strings starts.

        Raises:
            ValueError: an empty string, or all sets together have too many states.
        """
        key = tuple(stops)
        if key not in self._starts:
            automaton = token_automaton(key, self._token_bytes)
            size, start = len(automaton) - 1, self._num_states
            last = len(self.table) - 1
            if start + size > last:
                raise ValueError(
                    f"the stop strings {list(key)} and those before them need "
                    f"{start + size} states, more than the {last} available"
                )
            renumbered_states = np.where(
                automaton[:size] == size, last, automaton[:size] + start
            )
            # A copy: a call that is decoding may still read the old table.
            self.table = self.table.copy()
            self.table[start : start + size, : automaton.shape[1]] = renumbered_states
            self._starts[key], self._num_states = start, start + size
        return self._starts[key]
