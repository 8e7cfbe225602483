"""Owns the manifest: the one document that says how to route a version's ids and how to read its shards' state.

Written by the exporter only; read strictly by the front tier, the shard runtime and the command line. Must not import
torch or numpy.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from export.contract.names import CollectionName, RelativePath, shard_model_name

INT64_MAX = (1 << 63) - 1
SENTINEL_IDS = (-1, INT64_MAX)
"""Ids that never name a row of a managed-collision table: the hash table's and MCH's marks of an empty slot."""

NO_ROW = -1
"""The row id of an answer that is no row of the table (``zero``)."""

Count = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """Frozen, no type is bent to fit, and a field that nobody declared is an error: writer and readers cannot drift apart."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Remap(StrEnum):
    """How a raw id becomes a row."""

    NONE = "none"
    """The id is the row."""
    MCH = "mch"
    """TorchRec's ``MCHManagedCollisionModule``: a learned id → row map."""


class Routing(StrEnum):
    """Which shard holds an id."""

    TABLE = "table"
    """The one shard that holds the table."""
    ROWS = "rows"
    """The shard whose row range holds the id."""
    HASH = "hash"
    """``mix64(id) mod num_shards``, see ``export.contract.routing``."""


class RowDtype(StrEnum):
    """How a shard stores rows."""

    FP32 = "fp32"


class Unknown(StrEnum):
    """What an id without a row gets from a managed-collision table."""

    TRAINING = "training"
    """Exactly the row that the trained module gives in eval mode."""
    ZERO = "zero"
    """A row of zeros, row id −1."""


class OutOfRange(StrEnum):
    """What an id outside [0, rows) gets from a plain table."""

    REJECT = "reject"
    """The request is refused as an invalid argument."""
    ZERO = "zero"
    """A row of zeros, row id −1."""


class Placement(Strict):
    """One piece of a table on one shard."""

    shard: Count
    row_start: Count
    """First row of the piece, in the table's own numbering. ``hash`` routing: 0."""
    row_stop: Count
    """One past the last row. ``hash`` routing: the table's number of rows; which ids lie here is the hash's doing."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.row_stop < self.row_start:
            raise ValueError(f"row_stop {self.row_stop} lies before row_start {self.row_start}")
        return self


class Zch(Strict):
    """State of a managed-collision map at export, as the module itself counts it."""

    policy: str
    """Class name of the eviction policy, e.g. ``LFU_EvictionPolicy``."""
    size: Count
    """Rows the map can give out, the default row included (``zch_size``)."""
    occupied: Count
    """Ids in the map that are served: sentinels left out."""
    open_slots: Count
    """The module's own ``open_slots()``."""


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
    """Ordered by row range, then shard; ``table``: one, ``rows`` and ``hash``: one for each shard."""
    input_hash: RelativePath | None = None
    """File (relative to the version directory) of the program to run over this table's ids before anything else:
    INT64 [N] → INT64 [N], element by element. It uses aten operators only, so that torch alone loads and runs it: the
    exporter refuses any other, FBGEMM's included."""
    zch: Zch | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.features) != len(self.embedding_names) or not self.features:
            raise ValueError(f"table {self.name}: needs one embedding name for each feature, and a feature")
        if (self.remap is Remap.NONE) != (self.zch is None):
            raise ValueError(f"table {self.name}: zch belongs to managed-collision tables, and to each of them")
        if self.remap is not Remap.NONE and self.routing is Routing.ROWS:
            raise ValueError(
                f"table {self.name}: routing 'rows' needs row numbers, remap {self.remap.value} has raw ids"
            )
        if self.remap is Remap.NONE and self.routing is Routing.HASH:
            raise ValueError(f"table {self.name}: routing 'hash' is for managed-collision tables; use 'rows'")
        if self.routing is Routing.TABLE and len(self.placements) != 1:
            raise ValueError(f"table {self.name}: routing 'table' has one placement")
        if self.routing is Routing.ROWS:
            edge = 0
            for placement in self.placements:
                if placement.row_start != edge:
                    raise ValueError(
                        f"table {self.name}: rows {edge}..{placement.row_start} are on no shard, or on two"
                    )
                edge = placement.row_stop
            if edge != self.rows:
                raise ValueError(f"table {self.name}: placements end at row {edge}, the table has {self.rows}")
        return self


class ShardTable(Strict):
    """What one shard holds of one table."""

    table: str
    rows: Count
    """Rows of the table in this shard's state, default rows included."""
    zch_rows: Count = 0
    """Ids in this shard's map."""
    zch_open_slots: Count = 0
    """This shard's share of the table's open slots; the shares add up to the table's number."""


class StateFile(Strict):
    """A file of the version, by path relative to the version directory."""

    path: RelativePath
    size_bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Shard(Strict):
    """One shard: one Triton model."""

    index: Count
    model: str
    """Name of the Triton model: ``shard_model_name(collection, index)``."""
    tables: tuple[ShardTable, ...]
    """In the order of the request's ``table_lengths``."""
    state: tuple[str, ...]
    """Names of the tensors in the state file, in the order in which the program takes them after its two inputs."""
    state_bytes: Count


class Toolchain(Strict):
    """What wrote the version; a reader with another major set refuses with a hint."""

    kjtserve: str
    torch: str
    fbgemm_gpu: str
    torchrec: str


class Manifest(Strict):
    """One version of one collection.

    Attributes are documented in place; ``tables`` keeps the module's config order.
    """

    schema_version: Literal[1] = 1
    collection: CollectionName
    version: Annotated[int, Field(ge=1, le=INT64_MAX)]
    """Triton reads versions as INT64."""
    kind: Literal["base"] = "base"
    created_s: float
    """Seconds since the epoch."""
    num_shards: Annotated[int, Field(ge=1)]
    dim: Annotated[int, Field(ge=1)]
    """Embedding dimension, the same for all tables of a TorchRec collection."""
    tables: tuple[Table, ...]
    shards: tuple[Shard, ...]
    files: tuple[StateFile, ...]
    """Every file of the version but the manifest."""
    toolchain: Toolchain

    @property
    def features(self) -> tuple[str, ...]:
        """Feature names in the module's config order, each once: the default ``keys`` of a request."""
        return tuple(dict.fromkeys(feature for table in self.tables for feature in table.features))

    @property
    def embeddings(self) -> Iterator[tuple[str, Table, str]]:
        """(feature, table, embedding name) in TorchRec's order of embedding names."""
        for table in self.tables:
            for feature, name in zip(table.features, table.embedding_names, strict=True):
                yield feature, table, name

    def table(self, name: str) -> Table:
        """The table of that name; KeyError if there is none."""
        for table in self.tables:
            if table.name == name:
                return table
        raise KeyError(name)

    @model_validator(mode="after")
    def _tables_are_distinct(self) -> Self:
        names = [table.name for table in self.tables]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"tables must be named once each, and there must be one: {names}")
        makers: dict[str, str] = {}
        for _, table, name in self.embeddings:
            if name in makers:
                raise ValueError(f"tables {makers[name]} and {table.name}: both have the embedding name {name!r}")
            makers[name] = table.name
        return self

    @model_validator(mode="after")
    def _shards_are_numbered(self) -> Self:
        if [shard.index for shard in self.shards] != list(range(self.num_shards)):
            raise ValueError(f"shards must be 0..{self.num_shards - 1} in order")
        for shard in self.shards:
            if shard.model != (model := shard_model_name(self.collection, shard.index)):
                raise ValueError(f"shard {shard.index}: its model is {model}, not {shard.model!r}")
        return self

    @model_validator(mode="after")
    def _tables_are_placed(self) -> Self:
        for table in self.tables:
            if table.dim != self.dim:
                raise ValueError(f"table {table.name}: dim {table.dim}, the collection has {self.dim}")
            shards = [placement.shard for placement in table.placements]
            if table.routing is not Routing.TABLE and shards != list(range(self.num_shards)):
                raise ValueError(f"table {table.name}: routing {table.routing.value} names every shard once, in order")
            for shard in shards:
                if shard >= self.num_shards:
                    raise ValueError(f"table {table.name}: shard {shard} of {self.num_shards}")
                if [entry.table for entry in self.shards[shard].tables].count(table.name) != 1:
                    raise ValueError(f"table {table.name}: shard {shard} does not list it once")
        return self

    @model_validator(mode="after")
    def _shards_hold_what_is_placed(self) -> Self:
        placed = {(placement.shard, table.name) for table in self.tables for placement in table.placements}
        for shard in self.shards:
            for entry in shard.tables:
                if (shard.index, entry.table) not in placed:
                    raise ValueError(f"shard {shard.index}: lists table {entry.table!r}, which is not placed there")
        return self

    @model_validator(mode="after")
    def _files_are_listed(self) -> Self:
        listed = [file.path for file in self.files]
        if len(set(listed)) != len(listed):
            raise ValueError(f"files must be listed once each: {listed}")
        for table in self.tables:
            if table.input_hash is not None and table.input_hash not in listed:
                raise ValueError(f"table {table.name}: its input_hash {table.input_hash!r} is not among the files")
        return self
