"""Nearest vectors with ScaNN: exact over few, by their codes over more, partitioned
over many.

ScaNN (arXiv 1908.10396) proposes candidates. A result depends on its query alone, which
its batches do not give by themselves. Its brute force is a matrix product, whose
rounding changes with the batch: final scores are computed here, one query at a time.
Leaves chosen by products with float centroids would change with it too: they are int8.
Sums over codes are integers, the same in any batch.
"""

import dataclasses
import math
import os

import numpy as np

from rsearch.retrieval.exact import ExactSearcher
from rsearch.retrieval.scann_library import has_scann, import_scann
from rsearch.runtime.console import note

BRUTE_FORCE_MAX = 20_000  # vectors; of more, codes are compared
QUANTIZED_MAX = 100_000  # vectors whose codes are all compared; more are partitioned
FINER_BEYOND = 100_000  # vectors; of more, leaves are half as large
KINDS = ("brute_force", "quantized", "partitioned")
REORDER = 200  # candidates that codes find, and full vectors compare
NUM_CODES = 16  # of a block of dimensions, in 4 bits
MARGIN = 16  # candidates beyond the wanted ones, for ties and rounding
CODED_MARGIN = 4  # the same where codes are followed by full vectors, however rounded
CODED_AT_ONCE = 4  # queries that one reading of all codes serves
PARTED_AT_ONCE = 128  # queries that share the leaves that they look at
QUERIES_AT_ONCE = 16  # whose candidates are compared together: they stay in the cache
ROUNDING = 1e-5  # bound of ScaNN's error in a dot product of unit vectors
REORDER_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # of a dimension
SEED = 0  # of the queries that recall is measured with


@dataclasses.dataclass(frozen=True)
class Partition:
    """Settings of a ScaNN index that is not brute force.

    Attributes:
        num_leaves: parts that the vectors are clustered into; 1 for no parts.
        leaves_to_search: parts that a query looks at.
        reorder: candidates, by their codes, whose full vectors are compared.
        threshold: of the anisotropic quantisation loss; 0 weighs all errors the same.
        dims_per_block: dimensions that share one 4-bit code.
        reorder_dtype: of the full vectors that ScaNN holds in memory: a key of
            REORDER_BYTES.
    """

    num_leaves: int = 1
    leaves_to_search: int = 1
    reorder: int = REORDER
    threshold: float = 0.2
    dims_per_block: int = 2
    reorder_dtype: str = "float32"


def choose_partition(
    num,
    dim,
    *,
    kind="auto",
    leaves_to_search=None,
    reorder=None,
    dims_per_block=None,
    reorder_dtype="float32",
):
    """The settings for `num` vectors; None for brute force.

    As ScaNN advises, all vectors are compared up to BRUTE_FORCE_MAX, and their codes up
    to QUANTIZED_MAX: of 100 thousand of MiniLM's, codes of four dimensions each found
    0.999 of the nearest ten in the time in which partitions found 0.98. Such codes
    found more where all errors weigh the same (of 6,000 0.993, and not 0.986, with 100
    reordered). A query has 64 codes at least, or one for each dimension: of 22 thousand
    vectors of 64 dimensions codes of four found 0.87, and codes of one 0.997.

    Partitions are about the square root in number, of which two fifths are searched up
    to 100 thousand vectors (recall@10 0.99 over 13 thousand of MiniLM's, where a
    quarter gave 0.98); and beyond twice that, of which about 126 are searched. Of a
    million vectors twice as many queries a second find the same then: leaves of half
    the size cost more to be chosen, and less to be read.

    Coarser codes are read in less time, and find less: of 17 thousand those of six
    dimensions give a recall@10 of 0.95 to 0.98 sooner than those of four, and 0.99
    later. Those of more than two weigh all errors the same, in partitions too: of 17
    thousand, in 65 leaves, those of four then gave 0.95 in four fifths of the time.

    Args:
        num: how many vectors.
        dim: their width.
        kind: "auto" or one of KINDS.
        leaves_to_search, reorder, dims_per_block: instead of those chosen here; see
            Partition.
        reorder_dtype: see Partition; has no meaning for brute force.

    Raises:
        ValueError: a setting out of range, or given for a kind without it.
    """
    if kind not in ("auto", *KINDS):
        raise ValueError(f"{kind=}, expected 'auto' or one of {', '.join(KINDS)}")
    if reorder_dtype not in REORDER_BYTES:
        known = ", ".join(REORDER_BYTES)
        raise ValueError(f"{reorder_dtype=}, expected one of {known}")
    if kind == "auto":
        limits = (BRUTE_FORCE_MAX, QUANTIZED_MAX)
        kind = KINDS[sum(num > limit for limit in limits)]
    chosen = _chosen(num, dim, kind)
    given = {
        "leaves_to_search": leaves_to_search,
        "reorder": reorder,
        "dims_per_block": dims_per_block,
    }
    for name, value in given.items():
        if value is not None and name not in chosen:
            others = [k for k in KINDS if name in _chosen(num, dim, k)]
            raise ValueError(
                f"{name}={value} has no meaning for {kind=}, which {num} passages get; "
                f"kinds that take it: {', '.join(others)}"
            )
        if value is not None:
            chosen[name] = value
    if not chosen:
        return None
    if chosen["dims_per_block"] > 2:
        chosen["threshold"] = 0.0
    partition = Partition(**chosen, reorder_dtype=reorder_dtype)
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


def _chosen(num, dim, kind):
    if kind == "brute_force":
        return {}
    if kind == "quantized":
        size = min(4, max(1, dim // 64))
        return {"reorder": REORDER, "dims_per_block": size, "threshold": 0.0}
    finer = 1 if num <= FINER_BEYOND else 2
    num_leaves = round(finer * math.sqrt(num)) if num >= NUM_CODES else 1
    share = 0.4 / finer * min(1.0, math.sqrt(FINER_BEYOND / num))
    searched = max(math.ceil(share * num_leaves), min(20, num_leaves))
    leaves = {"num_leaves": num_leaves, "leaves_to_search": searched}
    return {**leaves, "reorder": REORDER, "dims_per_block": min(2, dim)}


def kind_of(partition):
    """Which of KINDS has these settings."""
    if partition is None:
        return "brute_force"
    return "partitioned" if partition.num_leaves > 1 else "quantized"


def queries_at_once(partition, num):
    """How many of `num` queries, searched on all cores, read the same codes at once."""
    most = PARTED_AT_ONCE if kind_of(partition) == "partitioned" else CODED_AT_ONCE
    return min(most, -(-num // os.cpu_count()))


def _has_leaves(partition, num):
    """Whether `num` vectors are clustered; the last part of an index may be too small.

    ScaNN makes no more leaves than there are vectors, and learns the codes of leaves
    from NUM_CODES vectors at least.
    """
    return num >= max(NUM_CODES, partition.num_leaves) and partition.num_leaves > 1


def build_searcher(vectors, partition):
    """A ScaNN searcher over [N, D] float32 vectors; partition None is brute force.

    Where ScaNN is not installed, NumPy stands in for brute force, and says so: final
    scores are computed here anyway, so that it finds the same.

    Raises:
        ValueError: ScaNN is not installed, and codes are to be compared.
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
            # A quarter to read, and a query has the same leaves in any batch.
            quantize_centroids=True,
        )
    builder = builder.score_ah(
        partition.dims_per_block,
        anisotropic_quantization_threshold=partition.threshold,
    )
    quantize = ReorderType[partition.reorder_dtype.upper()]
    return builder.reorder(partition.reorder, quantize).build()


class Nearest:
    """Vectors with the ScaNN searcher over them.

    Args:
        vectors: Vectors.
        searcher: as `build_searcher` makes it.
        partition: its settings; None is brute force.

    Attributes:
        dim: D, width of the vectors.
    """

    def __init__(self, vectors, searcher, partition):
        self.vectors, self.partition = vectors, partition
        self.dim = vectors.dim
        self._searcher = searcher
        # Of few vectors each costs a fiftieth of what ScaNN does for the query.
        self._margin = MARGIN if partition is None else CODED_MARGIN
        has_leaves = partition is not None and _has_leaves(partition, len(vectors))
        self._leaves = partition.leaves_to_search if has_leaves else None

    def __len__(self):
        return len(self.vectors)

    def search(self, queries, top_k):
        """The nearest vectors of each query: (positions, scores), [n, k] each.

        Args:
            queries: [n, D] float32, finite.
            top_k: how many; k = min(top_k, number of vectors) are found.

        Returns:
            [n, k] int64 positions and [n, k] float32 dot products, largest first; equal
            products in the order of their positions.
        """
        num = len(self.vectors)
        k = min(top_k, num)
        if not len(queries):
            return np.empty((0, k), np.int64), np.empty((0, k), np.float32)
        wanted = min(num, k + self._margin)
        queries = np.ascontiguousarray(queries, np.float32)
        if self.partition is None:
            ids, products = self._searcher.search_batched(
                queries, final_num_neighbors=wanted
            )
        else:
            # One call over all cores, which gives each a batch after the other.
            ids, products = self._searcher.search_batched_parallel(
                queries,
                final_num_neighbors=wanted,
                pre_reorder_num_neighbors=max(self.partition.reorder, wanted),
                leaves_to_search=self._leaves,
                batch_size=queries_at_once(self.partition, len(queries)),
            )
        # Where it finds too few, ScaNN pads with id 0 and a product of NaN.
        is_found = np.isfinite(products)
        found = np.where(is_found, ids, 0).astype(np.int64)
        products = np.empty(found.shape, np.float32)
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            part = slice(start, start + QUERIES_AT_ONCE)
            products[part] = self.vectors.pair_scores(queries[part], found[part])
        products[~is_found] = -np.inf
        order = np.lexsort((found, -products), axis=-1)
        order += np.arange(len(queries))[:, None] * found.shape[1]  # of all, flattened
        products, best = np.take(products, order), np.take(found, order[:, :k])
        is_whole = self._are_complete(products, best, k)
        if is_whole.all():
            return best, np.ascontiguousarray(products[:, :k])
        positions = np.empty((len(queries), k), np.int64)
        scores = np.empty((len(queries), k), np.float32)
        for row, whole in enumerate(is_whole):
            if whole:
                positions[row], scores[row] = best[row], products[row, :k]
            else:
                positions[row], scores[row] = self._search_all(queries[row], k)
        return positions, scores

    def _search_all(self, query, k):
        scores = self.vectors.all_scores(query)
        best = np.lexsort((np.arange(len(scores)), -scores))[:k]
        return best, scores[best]

    def _are_complete(self, scores, best, k):
        """[n] whether the candidates, by falling score, surely hold the best k.

        Args:
            scores: [n, wanted] of all, -inf where ScaNN had none.
            best: [n, <= k] positions of the first ones.
            k: that are wanted.
        """
        num, wanted = scores.shape
        if wanted < k:
            return np.zeros(num, bool)
        is_whole = scores[:, k - 1] > -np.inf
        # One position twice would stand beside itself: it has one score.
        is_whole &= (np.diff(best, axis=1) != 0).all(axis=1)
        if self.partition is not None:
            return is_whole
        count = (scores > -np.inf).sum(axis=1)
        last = scores[np.arange(num), np.maximum(count, 1) - 1]
        # A vector left out scores at most as much as the worst candidate, to rounding.
        is_apart = (count > k) & (scores[:, k - 1] - last > ROUNDING)
        return is_whole & (is_apart | (count == len(self.vectors)))


def exact_scores(vectors, queries, top_k):
    """[n, k] float32 the largest dot products of each query, by matrix products."""
    best = np.full((len(queries), min(top_k, len(vectors))), -np.inf, np.float32)
    for block in vectors.blocks:
        for start in range(0, len(block), 8192):
            part = np.asarray(block[start : start + 8192], np.float32)
            both = np.concatenate([best, queries @ part.T], axis=1)
            best = -np.partition(-both, best.shape[1] - 1, axis=1)[:, : best.shape[1]]
    return -np.sort(-best, axis=1)


def measure_recall(nearest, queries, *, top_k=10):
    """The share of the exactly nearest vectors that are found, over all queries.

    Among equal vectors one is as good as another: scores are compared, not positions.

    Args:
        nearest: Nearest.
        queries: [n, D] float32, n > 0.
        top_k: neighbours of a query that count.
    """
    _, scores = nearest.search(queries, top_k)
    return recall_of(scores, exact_scores(nearest.vectors, queries, top_k))


def recall_of(scores, exact):
    """The share of [n, k] scores that are among the k exactly largest, [n, k] too."""
    return float((scores >= exact[:, -1:] - ROUNDING).mean())
