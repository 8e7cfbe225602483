"""Owns the ids that a version is checked with, unlike the traced example in every way; must not look anything up."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from export.contract import INT64_MAX, SENTINEL_IDS, TrainingBuckets
from export.source import CollectionSource, TableSource

IdsByTable = Mapping[str, torch.Tensor]
"""INT64 [N] ids of each table."""

SIZES = (0, 1, 2, 7, 10_000)
"""Ids of a request; the programs were traced with 5."""
_SWEEP_BYTES = 4 << 20
_DISTINCT = 512
"""Random ids of a request, which are repeated if it is longer: the kernel may map 2 MB of a file for each row that is
looked at, and the rows of 10,000 would be all of a table in memory."""


def draw_requests(source: CollectionSource) -> Iterator[tuple[bool, IdsByTable]]:
    """(whether the ids are raw, ids by table): every size over all tables, then every other table left empty, then all."""
    rng = np.random.default_rng(20_24)
    hashed = any(table.map is not None and table.map.input_hash is not None for table in source.tables)
    for size in SIZES:
        for raw in (False, True) if hashed else (False,):
            yield raw, _draw(source, size, rng, filled=source.tables)
    for parity in range(2):
        filled = source.tables[parity::2]
        yield False, _draw(source, 7 * len(filled), rng, filled=filled)
    yield False, {}


def _draw(
    source: CollectionSource, size: int, rng: np.random.Generator, *, filled: tuple[TableSource, ...]
) -> IdsByTable:
    """``size`` ids spread over the filled tables at random; the others get none."""
    counts = list(rng.multinomial(size, [1 / len(filled)] * len(filled))) if filled else []
    distinct = max(_DISTINCT // max(len(filled), 1), 64)
    drawn = {table.name: _ids(table, int(count), distinct, rng) for table, count in zip(filled, counts, strict=True)}
    return {table.name: drawn.get(table.name, torch.empty(0, dtype=torch.int64)) for table in source.tables}


def _ids(table: TableSource, size: int, distinct: int, rng: np.random.Generator) -> torch.Tensor:
    """Known ids, their neighbours, unknown, negative and sentinel ids, with many duplicates."""
    known = table.rows if table.map is None else table.map.ids_K.numpy()  # a number: that many ids from 0 on
    edges = _edges(table)
    few = max(1, min(size, distinct) // 4)
    anywhere = rng.integers(-INT64_MAX - 1, INT64_MAX, size=few, dtype=np.int64)
    small = rng.integers(-table.rows, 2 * table.rows, size=few, dtype=np.int64)
    some = rng.choice(known, size=2 * few) if np.size(known) else edges
    pool = np.concatenate([some, some + 1, edges, anywhere, small])
    return torch.from_numpy(rng.choice(pool, size=size))


def sweep_ids(table: TableSource) -> Iterator[torch.Tensor]:
    """Every id that is special, then every id that has a row, in row order, some thousand at a time."""
    step = max(1, _SWEEP_BYTES // (4 * table.dim))
    yield special_ids(table)
    if table.map is not None:
        # Rows may lie in files, on both sides: read from front to back, a page is brought in once.
        yield from torch.split(table.map.ids_K[torch.argsort(table.map.rows_K)], step)
        return
    for first in range(0, table.rows, step):
        yield torch.arange(first, min(first + step, table.rows))


def special_ids(table: TableSource) -> torch.Tensor:
    """The sentinels and their neighbours, the ends of the table's rows, and those of training's blocks: INT64 [N]."""
    return torch.from_numpy(_edges(table))


def _edges(table: TableSource) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    edges = [*SENTINEL_IDS, INT64_MAX - 1, -INT64_MAX - 1, -2, 0, table.rows - 1, table.rows]
    if table.map is not None:
        edges += _block_edges(table.map.training)
    return np.array(edges, dtype=np.int64)


def _block_edges(training: TrainingBuckets) -> Iterator[int]:
    """Ids on either side of where a training block begins, and over-range ones, which every bucket gets some of."""
    starts = [block * training.block_size for block in range(training.buckets + 1)]
    around = {max(start + step, 0) for start in starts for step in (-1, 0, 1)}
    beyond = {first + step for first in (starts[-1], 1 << 63) for step in range(training.buckets)}
    for unsigned in sorted(around | beyond):
        yield unsigned if unsigned <= INT64_MAX else unsigned - (1 << 64)
