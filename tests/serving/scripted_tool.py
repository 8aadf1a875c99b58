"""A search tool around a policy that writes given turns."""

import collections
import threading

from rsearch.rollout.scheduler import RolloutEngine
from rsearch.serving.search_tool import SearchTool
from tests.rollout import scripted

TURNS = (scripted.SEARCHES, scripted.ANSWERS)


class ScriptedTool(SearchTool):
    """A search tool whose policy writes these turns for every question."""

    def __init__(self, turns=TURNS, search=scripted.find):
        self._host = host = scripted.make_host(search, self._on_change)
        script = scripted.Script([turns])
        self._engine = RolloutEngine(script, host, num_rows=4, group_size=1)
        self._search, self._params, self._answerer = search, None, None
        self._limits, self._max_chars = host.limits, 200
        self._changed, self._is_running = threading.Condition(), False
        self._waiting, self._batch, self._totals = [], [], collections.Counter()
