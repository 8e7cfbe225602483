"""Owns a manifest's table: how it is cut, where its pieces lie, and how its ids become rows."""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from export.contract.names import RelativePath
from export.contract.terms import NO_ROW, Count, OutOfRange, Remap, Routing, RowDtype, Strict, Unknown

ROUTINGS: Mapping[Remap, Sequence[Routing]] = {
    Remap.NONE: (Routing.TABLE, Routing.ROWS, Routing.COLUMNS, Routing.REPLICATED),
    Remap.MCH: (Routing.HASH, Routing.TABLE, Routing.TRAINING),
    Remap.MPZCH: (Routing.TRAINING, Routing.TABLE),
}
"""Routings that make sense for each kind of table; the first is the default of managed-collision tables."""


class Placement(Strict):
    """One piece of a table on one shard."""

    shard: Count
    row_start: Count
    """First row of the piece, in the table's own numbering. ``hash`` routing: 0."""
    row_stop: Count
    """One past the last row. ``hash`` routing: the table's number of rows; which ids lie here is the hash's doing."""
    col_start: Count = 0
    """First column of the piece."""
    col_stop: Count | None = None
    """One past its last column; None: the end of the row. Only ``columns`` routing cuts rows."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.row_stop < self.row_start:
            raise ValueError(f"row_stop {self.row_stop} lies before row_start {self.row_start}")
        if self.col_stop is not None and self.col_stop <= self.col_start:
            raise ValueError(f"col_stop {self.col_stop} does not lie behind col_start {self.col_start}")
        return self

    def columns(self, dim: int) -> tuple[int, int]:
        """Its columns [start, stop) of a table of that dimension."""
        return self.col_start, dim if self.col_stop is None else self.col_stop


class Zch(Strict):
    """State of a managed-collision map at export."""

    policy: str
    """Name of the eviction policy: MCH's class, e.g. ``LFU_EvictionPolicy``; MPZCH's ``HashZchEvictionPolicyName``, or
    ``none``."""
    size: Count
    """Rows the map can give out, the default row included (``zch_size``)."""
    occupied: Count
    """Ids in the map that are served: sentinels left out. MPZCH: slots that hold one."""
    open_slots: Count
    """Ids that the map can still take. MCH: the module's own ``open_slots()``, never below 0. MPZCH, whose own answers 0
    always: slots that hold no id, without the reserved ones; an id takes only one that is probed for it, so a map may
    turn ids away with some left."""
    evictions: Count = 0
    """Ids that lost their row from version to version, over all versions up to this one."""


class TrainingBuckets(Strict):
    """How training cut a managed-collision table: which bucket an id belongs to, and which rows a bucket has.

    TorchRec's ``RwSparseFeaturesDist`` and FBGEMM's ``block_bucketize_sparse_features``; see
    ``export.contract.routing.training_bucket``. An unsharded module has one bucket.
    """

    input_hash_size: Count
    """``input_hash_size``: ids below it are cut into blocks of equal size; 0: every id by modulo."""
    row_edges: tuple[Count, ...]
    """[buckets + 1]: bucket ``b`` has the rows [row_edges[b], row_edges[b + 1])."""
    floor_modulo: bool = False
    """With an ``input_hash_size`` of 0, a negative id's bucket is its floor modulo, as in MPZCH's own
    ``TrainInputMapper``, instead of the modulo of its 64 bits read as unsigned. They differ only where the number of
    buckets is no power of two."""

    @property
    def buckets(self) -> int:
        """How many buckets there are."""
        return len(self.row_edges) - 1

    @property
    def block_size(self) -> int:
        """Ids of each bucket's block; 0: there are no blocks."""
        return -(-self.input_hash_size // self.buckets)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        edges = self.row_edges
        if len(edges) < 2 or edges[0] != 0 or any(stop < start for start, stop in itertools.pairwise(edges)):
            raise ValueError(f"row_edges {edges}: they start with 0 and never fall, and there are two or more")
        if self.floor_modulo and self.input_hash_size:
            raise ValueError("floor_modulo belongs to an input_hash_size of 0")
        return self


class Mpzch(Strict):
    """Constants of a multi-probe table, as its ``zero_collision_hash`` call takes them."""

    max_probe: Annotated[int, Field(ge=1)]
    disable_fallback: bool
    """True: an id that the table does not hold has no row, or ``default_row``. False: it answers as the slot that it
    hashes to."""
    opt_in_prob: int = -1
    num_reserved_slots: int = -1
    """Slots at the end of each bucket for ids that were not opted in; −1 without opt-in."""
    default_row: Annotated[int, Field(ge=NO_ROW)] = NO_ROW
    """With ``disable_fallback``: the row of an id that the table does not hold (``no_bag``); −1: none."""


class Table(Strict):
    """One embedding table."""

    name: str
    rows: Annotated[int, Field(ge=1)]
    """``num_embeddings`` of the whole table."""
    dim: Annotated[int, Field(ge=1)]
    row_dtype: RowDtype
    features: tuple[str, ...]
    embedding_names: tuple[str, ...]
    """TorchRec's name of each feature's output: the feature, or ``feature@table`` where several tables share it."""
    remap: Remap
    unknown: Unknown = Unknown.TRAINING
    out_of_range: OutOfRange = OutOfRange.REJECT
    routing: Routing
    placements: tuple[Placement, ...]
    """``table``: one. ``rows`` and ``training``: in row order, a shard at most once. ``columns``: in column order, a shard
    as often as it has pieces. ``replicated``: a shard at most once. ``hash``: every shard once, in order."""
    training: TrainingBuckets | None = None
    """Managed-collision tables: decides the row of an id that the map does not hold, and ``training`` routing."""
    mpzch: Mpzch | None = None
    input_hash: RelativePath | None = None
    """File (relative to the version directory) of the program to run over this table's ids before anything else:
    INT64 [N] → INT64 [N], element by element. It uses aten operators only, so that torch alone loads and runs it: the
    exporter refuses any other, FBGEMM's included."""
    zch: Zch | None = None

    @property
    def managed(self) -> bool:
        """Whether raw ids are remapped."""
        return self.remap is not Remap.NONE

    def pieces_on(self, shard: int) -> tuple[Placement, ...]:
        """The pieces of the table on one shard, in the order in which their numbers follow each other there."""
        return tuple(piece for piece in self.placements if piece.shard == shard)

    def width_on(self, shard: int) -> int:
        """Numbers of each row of the table on one shard; 0 if it holds none."""
        return sum(stop - start for start, stop in (piece.columns(self.dim) for piece in self.pieces_on(shard)))

    @property
    def bucket_shards(self) -> tuple[int, ...]:
        """``training`` routing: the shard of each bucket."""
        assert self.training is not None
        owners = [piece for piece in self.placements if piece.row_start < piece.row_stop] or list(self.placements)
        stops = [piece.row_stop for piece in owners]
        last = len(owners) - 1
        return tuple(
            owners[min(bisect.bisect_right(stops, start), last)].shard for start in self.training.row_edges[:-1]
        )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.features) != len(self.embedding_names) or not self.features:
            raise ValueError(f"table {self.name}: needs one embedding name for each feature, and a feature")
        for field, wanted in (("zch", self.managed), ("training", self.managed), ("mpzch", self.remap is Remap.MPZCH)):
            if (getattr(self, field) is not None) != wanted:
                raise ValueError(f"table {self.name}: remap {self.remap.value} and {field} do not go together")
        if self.training is not None and self.training.row_edges[-1] != self.rows:
            raise ValueError(f"table {self.name}: buckets end at row {self.training.row_edges[-1]} of {self.rows}")
        if self.routing not in ROUTINGS[self.remap]:
            use = ", ".join(routing.value for routing in ROUTINGS[self.remap])
            raise ValueError(
                f"table {self.name}: routing {self.routing.value!r} is not for remap {self.remap.value}; use {use}"
            )
        check_placements(self)
        return self


def check_placements(table: Table) -> None:
    """Raise ValueError when a table's placements break its routing's rule."""
    pieces = table.placements
    shards = [piece.shard for piece in pieces]
    if table.routing is Routing.TABLE and len(pieces) != 1:
        raise ValueError(f"table {table.name}: routing 'table' has one placement")
    if table.routing is not Routing.COLUMNS and len(set(shards)) != len(shards):
        raise ValueError(f"table {table.name}: routing {table.routing.value!r} names a shard at most once: {shards}")
    if table.routing in {Routing.ROWS, Routing.TRAINING}:
        _check_cover(table, [(piece.row_start, piece.row_stop) for piece in pieces], "row", table.rows)
    elif any((piece.row_start, piece.row_stop) != (0, table.rows) for piece in pieces) or not pieces:
        raise ValueError(f"table {table.name}: routing {table.routing.value!r} places all rows 0..{table.rows}")
    if table.routing is Routing.COLUMNS:
        _check_cover(table, [piece.columns(table.dim) for piece in pieces], "column", table.dim)
    elif any((piece.col_start, piece.col_stop) != (0, None) for piece in pieces):
        raise ValueError(f"table {table.name}: only routing 'columns' cuts rows into columns")
    if table.routing is Routing.TRAINING:
        assert table.training is not None
        cuts = {piece.row_start for piece in pieces} - set(table.training.row_edges)
        if cuts:
            raise ValueError(f"table {table.name}: a shard starts inside a training bucket, at row {min(cuts)}")


def _check_cover(table: Table, ranges: Sequence[tuple[int, int]], what: str, end: int) -> None:
    edge = 0
    for start, stop in ranges:
        if start != edge:
            raise ValueError(f"table {table.name}: {what}s {edge}..{start} are on no shard, or on two")
        edge = stop
    if edge != end:
        raise ValueError(f"table {table.name}: placements end at {what} {edge}, the table has {end}")
