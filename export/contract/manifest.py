"""Owns the manifest: the one document that says how to route a version's ids and how to read its shards' state.

Written by the exporter only; read strictly by the front tier, the shard runtime and the command line. Must not import
torch or numpy.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from export.contract.names import CollectionName, RelativePath, shard_model_name
from export.contract.tables import Table
from export.contract.terms import INT64_MAX, Count, Kind, Routing, Runtime, Strict

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
VersionNumber = Annotated[int, Field(ge=1, le=INT64_MAX)]
"""Triton reads versions as INT64."""


class ShardTable(Strict):
    """What one shard holds of one table."""

    table: str
    rows: Count
    """Rows of the table in this shard's state, default rows included."""
    width: Annotated[int, Field(ge=1)]
    """Numbers of each row here: the table's ``dim``, or those of its columns on this shard."""
    max_error: Annotated[float, Field(ge=0)] = 0.0
    """Bound on the absolute error of any number here against the trained one; 0 for ``fp32``."""
    zch_rows: Count = 0
    """Ids in this shard's map."""
    zch_open_slots: Count = 0
    """This shard's share of the table's open slots; the shares add up to the table's number."""
    evicted: Count = 0
    """Ids of this shard that the version before (``Manifest.previous``) holds and this one does not."""
    overlay_ids: Count = 0
    """Delta: ids that got another row since the base."""
    overlay_tombstones: Count = 0
    """Delta: ids of the base that lost their row."""
    overlay_rows: Count = 0
    """Delta: rows in the overlay, of ids that are new or whose numbers changed."""


class StateFile(Strict):
    """A file of the version, by path relative to the version directory."""

    path: RelativePath
    size_bytes: Count
    sha256: Sha256


class Shard(Strict):
    """One shard: one Triton model."""

    index: Count
    model: str
    """Name of the Triton model: ``shard_model_name(collection, index)``."""
    tables: tuple[ShardTable, ...]
    """In the order of the request's ``table_lengths``."""
    width: Annotated[int, Field(ge=1)]
    """Numbers in a row of the shard's reply, ``[N', width]``: a divisor of every table's width. An id of a table of
    ``k`` times this width is answered with ``k`` rows of the reply, one after the other."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:[0-9]+)$")] = "cpu"
    """Where its state lies and its program runs."""
    state: tuple[str, ...]
    """Names of the tensors in the base's state file, in the order in which the program takes them after its two inputs."""
    state_bytes: Count
    overlay: tuple[str, ...] = ()
    """Delta: names of the tensors in the overlay file, each of which takes the place of the state's of that name."""
    overlay_bytes: Count = 0


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

    schema_version: Literal[3] = 3
    collection: CollectionName
    version: VersionNumber
    kind: Kind = Kind.BASE
    base: VersionNumber
    """The base whose files answer: its own number, or that of a delta's base."""
    base_sha256: Sha256 | None = None
    """Delta: SHA-256 of the base's manifest file, so that a delta is never laid over another base of that number."""
    previous: VersionNumber | None = None
    """The newest version when this one was published; what ``ShardTable.evicted`` counts from."""
    created_s: float
    """Seconds since the epoch."""
    runtime: Runtime = Runtime.PYTHON
    need_indices: bool = False
    """The collection's ``need_indices``: replies carry the looked-up indices, as TorchRec's JaggedTensors do."""
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
    def _kind_is_consistent(self) -> Self:
        delta = self.kind is Kind.DELTA
        if delta != (self.base < self.version) or delta != (self.base_sha256 is not None) or self.base > self.version:
            raise ValueError(
                f"kind {self.kind.value}, version {self.version}, base {self.base}: a base is its own base, a delta has an "
                "older one and its base_sha256"
            )
        for shard in self.shards:
            if bool(shard.overlay) != delta or not set(shard.overlay) <= set(shard.state):
                raise ValueError(f"shard {shard.index}: a delta replaces tensors of the state, and a base none")
        return self

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
            if table.routing is Routing.HASH and shards != list(range(self.num_shards)):
                raise ValueError(f"table {table.name}: routing hash names every shard once, in order")
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
                if entry.width != (width := self.table(entry.table).width_on(shard.index)) or width % shard.width:
                    raise ValueError(
                        f"shard {shard.index}: table {entry.table!r} has width {entry.width}, its pieces have {width}, "
                        f"and the shard's {shard.width} divides it"
                    )
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
