"""Count requests and their latencies, and write counts in Prometheus's text format.

The format has one line per sample: https://prometheus.io/docs/instrumenting/
exposition_formats.
"""

import bisect
import collections
import itertools
import threading
from collections.abc import Mapping

# Upper bounds of the latency buckets, in seconds.
BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RequestMetrics:
    """Counts of a service's finished requests; safe to use from several threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._statuses = collections.Counter()
        self._buckets: dict[str, list[int]] = {}
        self._seconds = collections.Counter()

    def observe(self, route: str, status: int, seconds: float) -> None:
        """Count a request.

        Args:
            route: the path of the route, not of the request, so that clients cannot
                add labels.
            seconds: time from the request's head to the end of the reply.
        """
        with self._lock:
            self._statuses[route, status] += 1
            buckets = self._buckets.setdefault(route, [0] * (len(BOUNDS) + 1))
            buckets[bisect.bisect_left(BOUNDS, seconds)] += 1
            self._seconds[route] += seconds

    def text(self) -> str:
        """Return the number of requests by route and status, and latencies by route."""
        name = "rsearch_request_seconds"
        lines = []
        with self._lock:
            for route, buckets in sorted(self._buckets.items()):
                totals = [*itertools.accumulate(buckets)]
                bounds = [*map(str, BOUNDS), "+Inf"]
                for bound, total in zip(bounds, totals, strict=True):
                    label = f'route="{route}",le="{bound}"'
                    lines.append(f"{name}_bucket{{{label}}} {total}")
                seconds = self._seconds[route]
                lines.append(f'{name}_sum{{route="{route}"}} {seconds:.6f}')
                lines.append(f'{name}_count{{route="{route}"}} {totals[-1]}')
            counts = [
                f'rsearch_requests_total{{route="{route}",status="{status}"}} {count}'
                for (route, status), count in sorted(self._statuses.items())
            ]
        counts = ["# TYPE rsearch_requests_total counter", *counts]
        return "\n".join([*counts, f"# TYPE {name} histogram", *lines]) + "\n"


def counts_text(counts: Mapping[str, int]) -> str:
    """Return {name: number} as text; names that end in _total are counters."""
    lines = []
    for name, number in counts.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE rsearch_{name} {kind}", f"rsearch_{name} {number}"]
    return "\n".join(lines) + "\n"
