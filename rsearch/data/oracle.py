"""Plan the searches of a policy that knows a question's gold passages.

Plans are made from gold annotations and from what the engine really finds; no model is
called. For the embedded world, `rsearch.world.plans` has all facts and plans better.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from rsearch.data.questions import bare_title, supporting_titles
from rsearch.protocols.base import Step
from rsearch.text.normalize import cover_exact_match
from rsearch.text.sentences import sentences
from rsearch.types import SEARCH, Answer, Passage, Question, ToolCall

WORD = re.compile(r"\w+")
QUALIFIER = re.compile(r"\s*\([^()]*\)$")  # in titles like "Inferno (1953 film)"
CLOSED_ANSWERS = ("yes", "no")  # answers that passages do not contain
NAMED_SHARE = 0.5  # a text with more than this share of a name's words names it
MAX_QUOTED = 40  # words of the longest sentence that a thought quotes
SHORT = 3  # words with at most this many letters say little
LEAD_WORDS = 8  # a passage was not cut off if this many of its first words are shown
OPENING = "I need to find the answer to the question."
LOST = "This does not help."


@dataclasses.dataclass(frozen=True)
class GoldHop:
    """A gold passage of a question, and the fact to look up in it.

    Attributes:
        title: title of the passage, without quotes.
        relation: relation to look up; "" if the annotation has none.
        object: value of the relation in the annotation; "" likewise.
    """

    title: str
    relation: str = ""
    object: str = ""

    @property
    def name(self) -> str:
        """Return the title without the words in brackets that disambiguate it."""
        return QUALIFIER.sub("", self.title) or self.title

    @property
    def queries(self) -> tuple[str, ...]:
        """Return the queries to try: the name with the relation, and without."""
        return (f"{self.name} {self.relation}".strip(), self.name)

    @property
    def full_query(self) -> str:
        """Return all words of the title, some of which may not have been read."""
        return " ".join(re.sub("[()]", " ", self.title).split())

    @property
    def need(self) -> str:
        """Return the thought before the search."""
        relation_phrase = f"the {self.relation} of " if self.relation else ""
        return f"I need to find {relation_phrase}{self.name}."

    @property
    def fact(self) -> str:
        """Return the thought that states what the passage says; "" if unknown."""
        if not self.object:
            return ""
        return f"The {self.relation} of {self.name} is {self.object}."


def gold_hops(question: Question) -> list[GoldHop]:
    """Return a question's gold passages as hops, in the order of its annotation.

    The titles are those of `supporting_titles`. 2WikiMultiHopQA's `evidences`, triples
    of subject, relation and object, give the relations. A title gets the first triple
    whose subject is the title, or else the first whose subject shares most of its words
    with the title and is not itself a title.
    """
    titles, triples = supporting_titles(question), gold_triples(question)
    subjects = {title.casefold() for title in titles}
    hops = []
    for title in titles:
        exact_triples = [t for t in triples if t[0].casefold() == title.casefold()]
        similar_triples = [
            t
            for t in triples
            if t[0].casefold() not in subjects and overlap(t[0], title) > NAMED_SHARE
        ]
        _, relation, value = next(iter(exact_triples or similar_triples), ("", "", ""))
        hops.append(GoldHop(title, relation, value))
    return hops


def gold_triples(question: Question) -> list[tuple[str, str, str]]:
    """Return 2WikiMultiHopQA's `evidences`: (subject, relation, object) of each fact.

    Entries in another form, or with a blank subject or relation, are left out.
    """
    evidences = question.metadata.get("evidences")
    triples = [
        tuple(" ".join(text.split()) for text in triple)
        for triple in (evidences if isinstance(evidences, list) else ())
        if isinstance(triple, list)
        and len(triple) == 3
        and all(isinstance(text, str) for text in triple)
    ]
    return [triple for triple in triples if triple[0] and triple[1]]


def plan_queries(question: Question, hops: Sequence[GoldHop]) -> list[str]:
    """Return all queries that a plan may search for, each once."""
    queries = [query for hop in hops for query in (*hop.queries, hop.full_query)]
    return list(dict.fromkeys([question.text.strip(), *queries]))


def overlap(name: str, text: str) -> float:
    """Return the share of a name's words that occur in a text."""
    words = WORD.findall(name.casefold())
    text_words = set(WORD.findall(text.casefold()))
    return sum(word in text_words for word in words) / max(len(words), 1)


def plan(
    question: Question,
    hops: Sequence[GoldHop],
    hits_of: Mapping[str, Sequence[Passage] | None],
    *,
    searches: str = "gold",
    recovers: bool = False,
    normalize: str,
    order: str,
) -> tuple[list[Step], str]:
    """Return (steps that find every gold passage, ""), or ([], why there are none).

    With `searches` "question" the only query is the question's text, and with "none"
    the answer is given without a search; neither has to find anything.

    Passages that the question names are searched for first, then those named by the
    passages read so far. A passage that an earlier search found is not searched again.

    Args:
        hits_of: {query: passages} of all `plan_queries`; None where a search failed.
        searches: "gold", "question" or "none".
        recovers: with "gold", whether the first query is the question itself, which
            must miss a gold passage. Otherwise the question is a query only if it names
            no title of a gold passage.
        normalize: a key of NORMALIZERS.
        order: order of an answer's words, see `cover_exact_match`.
    """
    if not hops:
        return [], "no gold titles"
    if any(hits_of[query] is None for query in plan_queries(question, hops)):
        return [], "search failed"
    first_query = question.text.strip()
    are_found = [_rank(hits_of[first_query], hop.title) is not None for hop in hops]
    if recovers and all(are_found):
        return [], "answered by the question"
    draft = _Draft(question, hops, hits_of, normalize=normalize, order=order)
    if recovers or searches == "question":
        draft.search(OPENING, first_query)
    while draft.pending and searches == "gold":
        hop, is_named = draft.next_hop()
        # The policy cannot know the words of such a query; it has only the question.
        if not is_named:
            if draft.steps or not any(are_found):
                return [], "gold title named nowhere"
            draft.search(OPENING, first_query)
            continue
        query = draft.best_query(hop)
        if query is None:
            return [], "gold passage not found"
        draft.search(hop.need, query)
    # The last step answers. After gold searches, a passage must state the answer.
    answers = question.golden_answers
    closed_answers = [a for a in answers if a.strip().casefold() in CLOSED_ANSWERS]
    read_answers = [answer for answer in answers if draft.has_read(answer)]
    if searches == "gold" and not closed_answers and not read_answers:
        return [], "answer in no passage"
    answer = (closed_answers or read_answers or list(answers))[0].strip()
    return draft.finish(answer), ""


class _Draft:
    """The steps of a plan so far.

    Attributes:
        pending: hops whose passages have not been found yet.
        steps: the searches.
    """

    def __init__(self, question, hops, hits_of, *, normalize, order):
        """Start without a search; see `plan` for the arguments."""
        self._question, self._hits_of = question, hits_of
        self._normalize, self._order = normalize, order
        self.pending: list[GoldHop] = list(hops)
        self.steps: list[Step] = []
        self._passages_read: list[Passage] = []
        self._findings: list[str] = []  # from the last search
        self._facts: list[str] = []  # from all searches

    def next_hop(self) -> tuple[GoldHop, bool]:
        """Return the pending hop to search for, and whether its name has been read."""
        question = self._question.text
        texts = [question, *(passage.contents for passage in self._passages_read)]
        text = " ".join(texts)
        # If several hops are equal, max takes the first in the annotation.
        hop = max(
            self.pending,
            key=lambda h: (
                overlap(h.name, question) > NAMED_SHARE,
                overlap(h.name, text),
            ),
        )
        return hop, overlap(hop.name, text) >= NAMED_SHARE

    def best_query(self, hop: GoldHop) -> str | None:
        """Return the query that ranks the hop's passage highest; None if none finds it.

        All words of the title are a query only if the others do not find the passage.
        """
        ranks = {
            query: _rank(self._hits_of[query], hop.title)
            for query in (*hop.queries, hop.full_query)
        }
        successful_queries = [q for q in hop.queries if ranks[q] is not None]
        if not successful_queries and ranks[hop.full_query] is None:
            return None
        return min(successful_queries, key=ranks.get, default=hop.full_query)

    def search(self, need: str, query: str) -> None:
        """Add a search, with the thought that precedes it."""
        thought = self._thought(*self._findings, need)
        self._add(thought, ToolCall(SEARCH, (query,)))
        hits = self._hits_of[query]
        self._passages_read.extend(hits)
        ranks = {hop: _rank(hits, hop.title) for hop in self.pending}
        self.pending = [hop for hop in self.pending if ranks[hop] is None]
        gold_hits = [(h, hits[rank]) for h, rank in ranks.items() if rank is not None]
        stated_facts = {
            hop: hop.fact
            for hop, passage in gold_hits
            if hop.object and self._holds(passage.text, hop.object)
        }
        self._facts.extend(stated_facts.values())
        self._findings = [
            stated_facts.get(hop) or self._finding(hop, passage)
            for hop, passage in gold_hits
        ] or [LOST]

    def has_read(self, answer: str) -> bool:
        """Return whether a passage that was found contains an answer."""
        return any(self._holds(p.contents, answer) for p in self._passages_read)

    def finish(self, answer: str) -> list[Step]:
        """Return all steps; the last one gives the answer."""
        # A comparison needs the facts of all searches.
        statements = [*self._facts, *self._findings, f"The answer is {answer}."]
        self._add(self._thought(*statements), Answer(answer))
        return self.steps

    def _add(self, thought, action):
        self.steps.append(Step(len(self.steps) + 1, thought, action))

    def _thought(self, *statements):
        """Return a thought; after a search it begins with the question."""
        # The question is far above the passages by then, and a small model loses it.
        prefix = [f"Question: {self._question.text.strip()}"] if self.steps else []
        return " ".join(dict.fromkeys([*prefix, *statements]))

    def _finding(self, hop, passage):
        """Return a short thought about a gold passage for which no fact is stated."""
        names = [*(h.name for h in self.pending), *self._question.golden_answers]
        names = [name for name in names if name not in (hop.name, hop.title)]
        # Where no annotation names a relation, a sentence of the passage expresses it:
        # the first of those that share the most words with the question.
        words = _content_words(self._question.text) - _content_words(hop.name)
        ranked_sentences = sorted(
            sentences(passage.text), key=lambda s: -len(words & _content_words(s))
        )
        for name in names:
            for sentence in ranked_sentences:
                if self._holds(sentence, name, order="contiguous"):
                    return _quote(hop, sentence) or (
                        f"The passage on {hop.name} mentions {name}."
                    )
        quotation = _quote(hop, ranked_sentences[0]) if ranked_sentences else ""
        return quotation or f"I have read about {hop.name}."

    def _holds(self, text, phrase, order=None):
        """Return whether a text contains a phrase."""
        order = order or self._order
        normalize = self._normalize
        return cover_exact_match(text, (phrase,), normalize=normalize, order=order) > 0


def is_shown(
    hops: Sequence[GoldHop],
    passages: Sequence[Passage],
    steps: Sequence[Step],
    text: str,
    *,
    normalize: str,
    order: str,
) -> bool:
    """Return whether a text has the gold passages' first words and what steps quote.

    Args:
        steps: steps from `plan`, whose thoughts quote sentences; the last one answers.
        text: text that was shown, cut to its budgets.
        normalize, order: see `plan`.
    """
    titles = {hop.title for hop in hops}
    leads = [
        " ".join(passage.text.split()[:LEAD_WORDS])
        for passage in passages
        if bare_title(passage) in titles
    ]
    thoughts = " ".join(step.thought for step in steps)
    quotations = [
        sentence
        for passage in passages
        for sentence in sentences(passage.text)
        if f'"{sentence}"' in thoughts
    ]
    facts = [hop.object for hop in hops if hop.object and hop.fact in thoughts]
    answer = steps[-1].action.text
    is_closed = answer.casefold() in CLOSED_ANSWERS
    phrases = [(text, "contiguous") for text in (*leads, *quotations) if text]
    phrases += [(text, order) for text in facts]
    phrases += [] if is_closed else [(answer, order)]

    def words(text: str) -> str:
        """Return the words joined by spaces, since a tag may touch the last one."""
        return " ".join(WORD.findall(text))

    text_words = words(text)
    return all(
        cover_exact_match(
            text_words, (words(phrase),), normalize=normalize, order=order
        )
        > 0
        for phrase, order in phrases
    )


def _content_words(text):
    """Return the longer words of a text, which are rarely articles and the like."""
    return {word for word in WORD.findall(text.casefold()) if len(word) > SHORT}


def _quote(hop, sentence):
    """Return a thought that quotes a passage's sentence; "" if that is too long."""
    if len(sentence.split()) > MAX_QUOTED:
        return ""
    return f'The passage on {hop.name} says: "{sentence}"'


def _rank(passages, title):
    """Return the position of the first passage with this title, or None."""
    titles = [bare_title(passage) for passage in passages]
    return titles.index(title) if title in titles else None
