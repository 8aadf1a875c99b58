"""Find the nearest vectors of a query: exactly among few, with ScaNN among more.

ScaNN (arXiv 1908.10396) proposes candidates; among many vectors it searches only some
partitions. A result must depend on its query alone, which ScaNN's batches by themselves
do not guarantee. Its brute force is a matrix product whose rounding depends on the
batch, so final scores are computed here, one query at a time. Leaves chosen by products
with float centroids would also depend on the batch, so centroids are int8. Sums over
codes are integers and the same in any batch.

An index may be split into parts: consecutive slices of its vectors, each searched on
its own (`MergedParts`). Results are merged by score, and equal scores by position, so
that exact parts together find what an exact search of all vectors finds, to the last
bit. This holds on hosts with the same kind of processor; others round scores
differently.

ScaNN is imported without tensorflow, and with its AVX2 kernels enabled, by
`import_scann`. Without ScaNN, NumPy compares all vectors.
"""

import ctypes
import dataclasses
import importlib.util
import itertools
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import numpy as np

from rsearch.retrieval.vectors import Vectors
from rsearch.runtime.console import note

BRUTE_FORCE_MAX = 20_000  # vectors; beyond this many, codes are compared
QUANTIZED_MAX = 100_000  # vectors; beyond this many, they are partitioned
SMALL_LEAVES_ABOVE = 100_000  # vectors; beyond this many, leaves are half as large
KINDS = ("brute_force", "quantized", "partitioned")
REORDER = 200  # candidates found by their codes whose full vectors are compared
NUM_CODES = 16  # values of the 4-bit code of a block of dimensions
MARGIN = 16  # extra candidates, for ties and rounding
CODED_MARGIN = 4  # the same if full vectors of any dtype are compared after codes
CODED_BATCH = 4  # queries served by one pass over all codes
PARTITIONED_BATCH = 128  # queries that share the leaves they search
SCORED_BATCH = 16  # queries whose candidates are compared together: they fit in cache
EXACT_BATCH = 16  # queries for which NumPy holds the products with all vectors
ROUNDING = 1e-5  # bound on ScaNN's error in a dot product of unit vectors
REORDER_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # per dimension
SEED = 0  # for drawing the queries that recall is measured with

AVX2 = {"avx2", "fma"}  # processor features that ScaNN's AVX2 kernels need
AVX2_SWITCH = "_ZN14research_scann14flags_internal15should_use_avx2E"
PROCESSOR = pathlib.Path("/proc/cpuinfo")


class IndexPartError(RuntimeError):
    """Parts of an index cannot be searched now; the message names them and says why."""


class NearestFn(Protocol):
    """The interface of Nearest, MergedParts and their counterparts on other hosts."""

    dim: int

    def __len__(self) -> int:
        """Return the number of vectors."""

    def search(self, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions and scores of the nearest vectors, [n, k] each."""


@dataclasses.dataclass(frozen=True)
class Partition:
    """Settings of a ScaNN index that is not brute force.

    Attributes:
        num_leaves: clusters that the vectors are divided into; 1 for no clusters.
        leaves_to_search: clusters searched for a query.
        reorder: number of best candidates by codes whose full vectors are compared.
        threshold: threshold of the anisotropic quantisation loss; 0 weighs all errors
            equally.
        dims_per_block: dimensions that share one 4-bit code.
        reorder_dtype: dtype of the full vectors that ScaNN holds in memory, a key of
            REORDER_BYTES.
    """

    num_leaves: int = 1
    leaves_to_search: int = 1
    reorder: int = REORDER
    threshold: float = 0.2
    dims_per_block: int = 2
    reorder_dtype: str = "float32"


def choose_partition(
    num: int,
    dim: int,
    *,
    kind: str = "auto",
    leaves_to_search: int | None = None,
    reorder: int | None = None,
    dims_per_block: int | None = None,
    reorder_dtype: str = "float32",
) -> Partition | None:
    """Choose the settings for an index of `num` vectors; None for brute force.

    As ScaNN advises, all vectors are compared up to BRUTE_FORCE_MAX, and all codes up
    to QUANTIZED_MAX, where codes alone find more than partitions do in the same time. A
    vector then has at least 64 codes, or one per dimension; fewer find too little.

    The number of leaves is about the square root of the number of vectors, and two
    fifths of them are searched up to SMALL_LEAVES_ABOVE vectors. Beyond that, leaves
    are half as large and the number searched is constant. Coarser codes are faster to
    read but find less. Codes of more than two dimensions weigh all errors equally,
    which finds more. docs/benchmarks_retrieval.md has the measurements.

    Args:
        kind: "auto" or one of KINDS.
        leaves_to_search, reorder, dims_per_block: override the values chosen here;
            see Partition.
        reorder_dtype: see Partition; not used for brute force.

    Raises:
        ValueError: a setting is out of range, or the kind does not use it.
    """
    if kind not in ("auto", *KINDS):
        raise ValueError(
            f"{kind=}, expected 'auto' or one of {', '.join(KINDS)}, or bm25, which "
            "needs no encoder"
        )
    if reorder_dtype not in REORDER_BYTES:
        dtypes = ", ".join(REORDER_BYTES)
        raise ValueError(f"{reorder_dtype=}, expected one of {dtypes}")
    if kind == "auto":
        limits = (BRUTE_FORCE_MAX, QUANTIZED_MAX)
        kind = KINDS[sum(num > limit for limit in limits)]
    settings = _default_settings(num, dim, kind)
    overrides = {
        "leaves_to_search": leaves_to_search,
        "reorder": reorder,
        "dims_per_block": dims_per_block,
    }
    for name, value in overrides.items():
        if value is not None and name not in settings:
            other_kinds = [k for k in KINDS if name in _default_settings(num, dim, k)]
            raise ValueError(
                f"{name}={value} has no meaning for {kind=}, which {num} passages get; "
                f"kinds that take it: {', '.join(other_kinds)}"
            )
        if value is not None:
            settings[name] = value
    if not settings:
        return None
    if settings["dims_per_block"] > 2:
        settings["threshold"] = 0.0
    partition = Partition(**settings, reorder_dtype=reorder_dtype)
    if not 1 <= partition.leaves_to_search <= partition.num_leaves:
        raise ValueError(
            f"{leaves_to_search=}, expected 1 to {partition.num_leaves}, the number of "
            f"leaves for {num} passages"
        )
    if partition.reorder < 1:
        raise ValueError(f"{reorder=}, expected at least 1")
    if not 1 <= partition.dims_per_block <= dim:
        raise ValueError(f"{dims_per_block=}, expected 1 to {dim}, the vectors' width")
    return partition


def _default_settings(num, dim, kind):
    if kind == "brute_force":
        return {}
    if kind == "quantized":
        block_dims = min(4, max(1, dim // 64))
        return {"reorder": REORDER, "dims_per_block": block_dims, "threshold": 0.0}
    leaf_factor = 1 if num <= SMALL_LEAVES_ABOVE else 2
    num_leaves = round(leaf_factor * math.sqrt(num)) if num >= NUM_CODES else 1
    share = 0.4 / leaf_factor * min(1.0, math.sqrt(SMALL_LEAVES_ABOVE / num))
    num_searched = max(math.ceil(share * num_leaves), min(20, num_leaves))
    leaves = {"num_leaves": num_leaves, "leaves_to_search": num_searched}
    return {**leaves, "reorder": REORDER, "dims_per_block": min(2, dim)}


def partition_kind(partition: Partition | None) -> str:
    """Return the entry of KINDS that these settings belong to."""
    if partition is None:
        return "brute_force"
    return "partitioned" if partition.num_leaves > 1 else "quantized"


def batch_size(partition: Partition, num: int) -> int:
    """Return ScaNN's batch size for `num` queries that are spread over all cores."""
    is_partitioned = partition_kind(partition) == "partitioned"
    limit = PARTITIONED_BATCH if is_partitioned else CODED_BATCH
    return min(limit, -(-num // os.cpu_count()))


def _has_leaves(partition, num):
    """Return whether `num` vectors are clustered; a last part may be too small for it.

    ScaNN makes no more leaves than there are vectors, and needs at least NUM_CODES
    vectors to learn the codes of leaves.
    """
    return num >= max(NUM_CODES, partition.num_leaves) and partition.num_leaves > 1


def build_searcher(vectors: np.ndarray, partition: Partition | None) -> object:
    """Build a ScaNN searcher over [N, D] float32 vectors.

    If ScaNN is not installed, NumPy replaces its brute force, and a note says so.
    Nearest computes the final scores in any case, so both find the same.

    Args:
        vectors: [N, D] float32.
        partition: settings; None is brute force.

    Raises:
        ValueError: codes are to be compared, but ScaNN is not installed.
    """
    if partition is None and not has_scann():
        note(f"scann is not installed: NumPy compares {len(vectors):,} vectors")
        return ExactSearcher(vectors)
    ops = import_scann()
    from scann.scann_ops.py.scann_builder import ReorderType

    builder = ops.builder(vectors, 10, "dot_product")
    if partition is None:
        return builder.score_brute_force().build()
    if _has_leaves(partition, len(vectors)):
        builder = builder.tree(
            partition.num_leaves,
            partition.leaves_to_search,
            training_sample_size=min(len(vectors), 250_000),
            # int8 takes a quarter of the bytes, and makes leaves independent of the
            # batch.
            quantize_centroids=True,
        )
    builder = builder.score_ah(
        partition.dims_per_block,
        anisotropic_quantization_threshold=partition.threshold,
    )
    quantize = ReorderType[partition.reorder_dtype.upper()]
    return builder.reorder(partition.reorder, quantize).build()


class Nearest:
    """Vectors, with a ScaNN searcher that proposes candidates among them.

    Args:
        searcher: a searcher from `build_searcher`, or one with the same interface.
        partition: settings of the searcher; None is brute force.
        margin: number of extra candidates; None takes as many as ScaNN needs.
        rounding: for brute force, bound on the error in the difference between two
            products, for a query of length 1.

    Attributes:
        dim: D, width of the vectors.
    """

    def __init__(
        self,
        vectors: Vectors,
        searcher: object,
        partition: Partition | None,
        *,
        margin: int | None = None,
        rounding: float = ROUNDING,
    ):
        self.vectors = vectors
        self.partition = partition
        self.dim = vectors.dim
        self._searcher = searcher
        # Brute force needs a wide margin, because rounding decides there; among few
        # vectors that is cheap. Elsewhere the codes decide.
        self._margin = MARGIN if partition is None else CODED_MARGIN
        if margin is not None:
            self._margin = margin
        self._rounding = rounding
        has_leaves = partition is not None and _has_leaves(partition, len(vectors))
        self._leaves = partition.leaves_to_search if has_leaves else None

    def __len__(self) -> int:
        return len(self.vectors)

    def search(self, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the nearest vectors of each query: (positions, scores), [n, k] each.

        Args:
            queries: [n, D] float32, finite.
            top_k: number of vectors wanted; k = min(top_k, number of vectors) are
                found.

        Returns:
            [n, k] int64 positions and [n, k] float32 dot products, largest first; equal
            products are ordered by position.
        """
        num = len(self.vectors)
        k = min(top_k, num)
        if not len(queries):
            return np.empty((0, k), np.int64), np.empty((0, k), np.float32)
        num_candidates = min(num, k + self._margin)
        queries = np.ascontiguousarray(queries, np.float32)
        if self.partition is None:
            ids, products = self._searcher.search_batched(
                queries, final_num_neighbors=num_candidates
            )
        else:
            # One call uses all cores and hands each core one batch after another.
            ids, products = self._searcher.search_batched_parallel(
                queries,
                final_num_neighbors=num_candidates,
                pre_reorder_num_neighbors=max(self.partition.reorder, num_candidates),
                leaves_to_search=self._leaves,
                batch_size=batch_size(self.partition, len(queries)),
            )
        # If ScaNN finds too few, it pads with id 0 and a product of NaN.
        is_candidate = np.isfinite(products)
        candidates = np.where(is_candidate, ids, 0).astype(np.int64)
        # ScaNN's own products depend on the batch, so each score is computed by itself.
        products = np.empty(candidates.shape, np.float32)
        for start in range(0, len(queries), SCORED_BATCH):
            rows = slice(start, start + SCORED_BATCH)
            products[rows] = self.vectors.pair_scores(queries[rows], candidates[rows])
        products[~is_candidate] = -np.inf
        order = np.lexsort((candidates, -products), axis=-1)
        order += np.arange(len(queries))[:, None] * candidates.shape[1]  # flattened
        products = np.take(products, order)
        best = np.take(candidates, order[:, :k])
        lengths = np.linalg.norm(queries, axis=1)
        is_complete = self._are_complete(products, best, k, lengths)
        positions = np.empty((len(queries), k), np.int64)
        scores = np.empty((len(queries), k), np.float32)
        for row, query in enumerate(queries):
            if is_complete[row]:
                positions[row], scores[row] = best[row], products[row, :k]
            else:
                positions[row], scores[row] = self._search_all(query, k)
        return positions, scores

    def _search_all(self, query, k):
        """Return the (positions, scores) of the best k by comparing all vectors."""
        scores = self.vectors.all_scores(query)
        best = np.lexsort((np.arange(len(scores)), -scores))[:k]
        return best, scores[best]

    def _are_complete(self, scores, best, k, lengths):
        """Return [n] bool: whether the candidates certainly contain the best k.

        Args:
            scores: [n, candidates] in descending order, -inf where ScaNN found none.
            best: [n, <= k] positions of the first candidates.
            lengths: [n] lengths of the queries.
        """
        num, num_candidates = scores.shape
        if num_candidates < k:
            return np.zeros(num, bool)
        is_complete = scores[:, k - 1] > -np.inf
        # A repeated position has equal scores, so its copies would be adjacent.
        is_complete &= (np.diff(best, axis=1) != 0).all(axis=1)
        if self.partition is not None:
            return is_complete
        num_found = (scores > -np.inf).sum(axis=1)
        worst_scores = scores[np.arange(num), np.maximum(num_found, 1) - 1]
        # Up to rounding, a vector left out scores no more than the worst candidate.
        rounding = self._rounding * lengths
        is_separated = (num_found > k) & (scores[:, k - 1] - worst_scores > rounding)
        return is_complete & (is_separated | (num_found == len(self.vectors)))


class MergedParts:
    """Several parts of an index as one, with the `len` and `search` of Nearest.

    Args:
        firsts: [parts] position of each part's first vector.
        parts: [parts] searches over consecutive vectors.
    """

    def __init__(self, firsts: Sequence[int], parts: Sequence[NearestFn]):
        self._firsts = list(firsts)
        self._parts = list(parts)
        self.dim = self._parts[0].dim

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def search(self, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the nearest vectors of all parts, as Nearest does."""
        results = []
        for first, nearest in zip(self._firsts, self._parts, strict=True):
            positions, scores = nearest.search(queries, top_k)
            results.append((first + positions, scores))
        return merge_best(results, top_k)


def merge_best(
    results: Sequence[tuple[np.ndarray, np.ndarray]], top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Merge the results of several parts of an index.

    Args:
        results: [parts] of (positions, scores), each [n, k of that part].
        top_k: number of results to keep per query; all of them if there are fewer.

    Returns:
        [n, k] positions and scores, largest score first, equal scores by position.
    """
    positions, scores = (np.concatenate(arrays, axis=1) for arrays in zip(*results))
    order = np.lexsort((positions, -scores), axis=-1)[:, :top_k]
    return tuple(np.take_along_axis(a, order, axis=1) for a in (positions, scores))


def split_evenly(items: Sequence, num_parts: int) -> list[Sequence]:
    """Return [num_parts] consecutive slices whose lengths differ by at most one."""
    cuts = [len(items) * i // num_parts for i in range(num_parts + 1)]
    return [items[a:b] for a, b in itertools.pairwise(cuts)]


def exact_scores(vectors: Vectors, queries: np.ndarray, top_k: int) -> np.ndarray:
    """Return [n, k] float32: the largest dot products of each query.

    They come from matrix products, which are fast but round differently from Nearest.
    """
    best = np.full((len(queries), min(top_k, len(vectors))), -np.inf, np.float32)
    for block in vectors.blocks:
        for start in range(0, len(block), 8192):
            rows = np.asarray(block[start : start + 8192], np.float32)
            pool = np.concatenate([best, queries @ rows.T], axis=1)
            best = -np.partition(-pool, best.shape[1] - 1, axis=1)[:, : best.shape[1]]
    return -np.sort(-best, axis=1)


def recall_of(scores: np.ndarray, exact: np.ndarray) -> float:
    """Return the share of [n, k] scores that reach the k-th of the [n, k] exact scores.

    Scores are compared, not positions, because equal vectors are equally good results.
    """
    return float((scores >= exact[:, -1:] - ROUNDING).mean())


class ExactSearcher:
    """NumPy instead of ScaNN's brute force: proposes the same candidates, unordered.

    Args:
        vectors: [N, D] float32.
    """

    def __init__(self, vectors: np.ndarray):
        self._vectors = np.asarray(vectors, np.float32)

    def search_batched(
        self, queries: np.ndarray, final_num_neighbors: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ([n, k] positions, [n, k] float32 dot products) of the k nearest.

        Args:
            queries: [n, D] float32.
            final_num_neighbors: k, at most N.
        """
        shape = len(queries), final_num_neighbors
        positions = np.empty(shape, np.int64)
        products = np.empty(shape, np.float32)
        for start in range(0, len(queries), EXACT_BATCH):
            rows = slice(start, start + EXACT_BATCH)
            scores = queries[rows] @ self._vectors.T
            best = np.argpartition(scores, -shape[1], axis=1)[:, -shape[1] :]
            positions[rows] = best
            products[rows] = np.take_along_axis(scores, best, axis=1)
        return positions, products


def has_scann() -> bool:
    """Return whether ScaNN is installed, without importing it."""
    return importlib.util.find_spec("scann") is not None


def import_scann() -> ModuleType:
    """Import ScaNN's operations on NumPy arrays, without tensorflow and with AVX2.

    `import scann` imports tensorflow if it is installed, for operations that are not
    used here; ScaNN also works if that import fails.

    Raises:
        ValueError: ScaNN is not installed.
    """
    if not has_scann():
        raise ValueError(
            "scann, which compares the codes of an index, is not installed: install "
            "it (on Linux), or build the index with --kind=brute_force"
        )
    if "scann" not in sys.modules:
        missing = object()
        tensorflow = sys.modules.get("tensorflow", missing)
        sys.modules["tensorflow"] = None  # makes importing it fail
        try:
            import scann  # noqa: F401
        finally:
            if tensorflow is missing:
                del sys.modules["tensorflow"]
            else:
                sys.modules["tensorflow"] = tensorflow
    from scann.scann_ops.py import scann_ops_pybind

    enable_avx2(sys.modules["scann_pybind"].__file__)
    return scann_ops_pybind


def enable_avx2(library: str) -> None:
    """Let ScaNN use its AVX2 kernels if the processor supports them.

    ScaNN's packages contain these kernels and select them by a variable that says
    whether the processor has AVX2. In versions 1.4.0 to 1.4.2 that test is compiled to
    "no" for every processor, and codes are compared with SSE4, which is slower. The
    AVX-512 kernels are no faster than these and are left as they are.

    Args:
        library: path of the loaded extension module, which exports the variable.
    """
    if not processor_features() >= AVX2:
        return
    try:
        switch = ctypes.c_bool.in_dll(ctypes.CDLL(library), AVX2_SWITCH)
    except ValueError:
        note("this version of scann does not allow AVX2 to be enabled")
        return
    switch.value = True


def processor_features() -> set[str]:
    """Return the names of the processor's features on Linux; an empty set elsewhere."""
    try:
        lines = PROCESSOR.read_text().splitlines()
    except OSError:
        return set()
    fields = (line.partition(":") for line in lines)
    flags = (value for name, _, value in fields if name.strip() == "flags")
    return set(next(flags, "").split())
