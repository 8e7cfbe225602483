"""Owns the ids that a version is checked with, unlike the traced example in every way; must not look anything up."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from export.contract import INT64_MAX
from export.source import CollectionSource, TableSource

IdsByTable = Mapping[str, torch.Tensor]
"""INT64 [N] ids of each table."""

SIZES = (0, 1, 2, 7, 10_000)
"""Ids of a request; the programs were traced with 5."""
_SWEEP_BYTES = 4 << 20


def draw_requests(source: CollectionSource) -> Iterator[tuple[bool, IdsByTable]]:
    """(whether the ids are raw, ids by table): every size, once over all tables, and once with each table left empty."""
    rng = np.random.default_rng(20_24)
    hashed = any(table.map is not None and table.map.input_hash is not None for table in source.tables)
    for size in SIZES:
        for raw in (False, True) if hashed else (False,):
            yield raw, _draw(source, size, rng, empty=None)
    for empty in source.tables:
        yield False, _draw(source, 7 * len(source.tables), rng, empty=empty.name)
    yield False, {}


def _draw(source: CollectionSource, size: int, rng: np.random.Generator, *, empty: str | None) -> IdsByTable:
    """``size`` ids spread over the tables at random."""
    filled = [table for table in source.tables if table.name != empty]
    counts = list(rng.multinomial(size, [1 / len(filled)] * len(filled))) if filled else []
    drawn = {table.name: _ids(table, int(count), rng) for table, count in zip(filled, counts, strict=True)}
    return {table.name: drawn.get(table.name, torch.empty(0, dtype=torch.int64)) for table in source.tables}


def _ids(table: TableSource, size: int, rng: np.random.Generator) -> torch.Tensor:
    """Known ids, their neighbours, unknown, negative and sentinel ids, with many duplicates."""
    known = np.arange(table.rows, dtype=np.int64) if table.map is None else table.map.ids_K.numpy()
    edges = np.array([-1, INT64_MAX, INT64_MAX - 1, -INT64_MAX - 1, 0, table.rows - 1, table.rows], dtype=np.int64)
    anywhere = rng.integers(-INT64_MAX - 1, INT64_MAX, size=max(1, size // 4), dtype=np.int64)
    small = rng.integers(-table.rows, 2 * table.rows, size=max(1, size // 4), dtype=np.int64)
    some = rng.choice(known, size=max(1, size // 2)) if known.size else edges
    pool = np.concatenate([some, some + 1, edges, anywhere, small])
    return torch.from_numpy(rng.choice(pool, size=size))


def sweep_ids(table: TableSource) -> Iterator[torch.Tensor]:
    """Every id that has a row, some thousand at a time."""
    step = max(1, _SWEEP_BYTES // (4 * table.dim))
    if table.map is not None:
        yield from torch.split(table.map.ids_K, step)
        return
    for first in range(0, table.rows, step):
        yield torch.arange(first, min(first + step, table.rows))
