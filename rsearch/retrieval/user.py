"""A search engine of the user's own: any function that maps queries to passages."""

import dataclasses
import math
import numbers
from collections.abc import Sequence

from rsearch.text.extension import check_callable, code_inputs, load_reference
from rsearch.tools.base import check_results
from rsearch.types import Passage, SearchFn, copy_search_attributes

SIGNATURE = "(queries) -> for each its passages, best first, or None"
WITH_IDS = SIGNATURE.replace("(queries)", "(queries, question_ids)")


class UserSearch:
    """A SearchFn that calls a user's function and checks what it returns.

    What a query finds must depend on the query alone, since a resumed run asks again.

    Args:
        field: the configuration field, or another name for the function, for messages.
        search: a SearchFn (see `rsearch.types`), or its "package.module:name".
        top_k: passages per query; more are dropped.

    Attributes:
        fingerprint: engines with equal fingerprints find the same.
        searches_at_once, wants_question_ids, read: the function's; see `SearchFn`.

    Raises:
        ValueError: there is no such function.
    """

    def __init__(self, field: str, search: str | SearchFn, *, top_k: int):
        if isinstance(search, str):
            self._search = load_reference(field, search)
            self._name = f"{field} = {search!r}"
            code = ", ".join(code_inputs([search]).values())
            self.fingerprint = f"{search} {code}"
        else:
            self._search, self._name, self.fingerprint = search, field, repr(search)
        check_callable(field, search, self._search, signature_of(self._search))
        self._top_k = top_k
        copy_search_attributes(self._search, self)

    def __str__(self) -> str:
        return self._name

    def __call__(
        self, queries: Sequence[str], *question_ids: Sequence[str]
    ) -> list[tuple[Passage, ...] | None]:
        """Return the passages of each query; None if its search failed.

        Args:
            queries: texts.
            question_ids: a list of ids, if the function wants them; see `SearchFn`.

        Raises:
            ValueError: the function's result has another form.
        """
        results = self._search(list(queries), *question_ids)
        check_results(self._name, results, len(queries), "queries")
        return [self._checked(result) for result in results]

    def _checked(self, result):
        """Return the first `top_k` passages of one query's result."""
        if result is None:
            return None
        if not isinstance(result, list | tuple):
            kind = type(result).__name__
            raise ValueError(
                f"{self._name} returned {result!r}, a {kind}, for a query: must be a "
                "list of passages, or None"
            )
        return tuple(map(self._checked_passage, result))[: self._top_k]

    def _checked_passage(self, passage):
        """Return a passage that can be written as JSON, as rollouts and replies are."""
        if not isinstance(passage, Passage):
            kind = type(passage).__name__
            raise ValueError(
                f"{self._name} returned {passage!r}, a {kind}, among passages: "
                f"must be a {Passage.__module__}.Passage"
            )
        for name in ("id", "contents"):
            value = getattr(passage, name)
            if not isinstance(value, str):
                kind = type(value).__name__
                raise ValueError(
                    f"{self._name} returned a passage with {name} = {value!r}, a "
                    f"{kind}: must be a str"
                )
        score = passage.score
        if score is None:
            return passage
        is_number = isinstance(score, numbers.Real) and not isinstance(score, bool)
        if not is_number or not math.isfinite(score):
            raise ValueError(
                f"{self._name} returned the passage {passage.id!r} with score = "
                f"{score!r}: must be a finite number, or None"
            )
        # A search in NumPy gives float32 scores, which are not JSON numbers.
        return dataclasses.replace(passage, score=float(score))


def signature_of(search: SearchFn) -> str:
    """Return, as text, the arguments and results required of a user's function."""
    return WITH_IDS if getattr(search, "wants_question_ids", False) else SIGNATURE
