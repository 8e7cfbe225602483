"""Owns the neutral description of a TorchRec collection, wherever it was read from; must not read one.

Shape suffixes: K ids in a managed-collision map, R rows of a table.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torchrec.modules.mc_modules import ManagedCollisionModule

from export.contract import Mpzch, Placement, Remap, TrainingBuckets
from export.rows import TableRows

HashFunction = Callable[[torch.Tensor, int], torch.Tensor]
"""TorchRec's ``input_hash_func``: (ids INT64 [N], input_hash_size) → ids INT64 [N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputHash:
    """What a managed collision module does to an id before it looks it up."""

    function: HashFunction
    size: int
    """``input_hash_size``, the function's second argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapPiece:
    """The part of a map that one training rank owned, as TorchRec's own module: what the oracle asks."""

    row_start: int
    row_stop: int
    module: ManagedCollisionModule

    @property
    def open_slots(self) -> int:
        """MCH: the module's own ``open_slots()``, never below 0. MPZCH's is a stub that answers 0."""
        return max(0, int(self.module.open_slots()))


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSource:
    """The learned id → row map of one managed-collision table."""

    remap: Remap
    pieces: tuple[MapPiece, ...]
    """In row order: one for an unsharded module, one for each training rank of a checkpoint, this rank's alone of a live
    sharded module."""
    training: TrainingBuckets
    policy: str
    """Name of the eviction policy, see ``export.contract.Zch``."""
    ids_K: torch.Tensor
    """INT64, after the input hash, sentinels left out; each piece's are ascending (MCH) or in row order (MPZCH)."""
    rows_K: torch.Tensor
    """INT64: the row of each id, in the whole table's numbering. An id that MPZCH training put into several slots is here
    once for each; the one that is probed first answers."""
    input_hash: InputHash | None
    mpzch: Mpzch | None = None
    identities_R: torch.Tensor | None = None
    """MPZCH: INT64 [R], the id in each row's slot, −1 where empty."""

    @property
    def open_slots(self) -> int:
        """Open slots of all pieces that are here; see ``export.contract.Zch``."""
        if self.identities_R is not None:
            return sum(self._empty_slots(piece.row_start, piece.row_stop) for piece in self.pieces)
        return sum(piece.open_slots for piece in self.pieces)

    def open_slots_in(self, rows: Placement) -> int:
        """Open slots of the pieces that begin among the rows of a placement; MPZCH: of the placement's own rows."""
        if self.identities_R is not None:
            return self._empty_slots(rows.row_start, rows.row_stop)
        begun = [piece for piece in self.pieces if rows.row_start <= piece.row_start < rows.row_stop]
        return sum(piece.open_slots for piece in begun)

    def _empty_slots(self, start: int, stop: int) -> int:
        """Slots of whole buckets that hold no id, without the reserved ones, which never do."""
        assert self.identities_R is not None
        assert self.mpzch is not None
        buckets = sum(start <= edge < stop for edge in self.training.row_edges[:-1])
        reserved = max(self.mpzch.num_reserved_slots, 0) * buckets
        return max(0, int((self.identities_R[start:stop] == -1).sum()) - reserved)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSource:
    """One table of the module."""

    name: str
    features: tuple[str, ...]
    embedding_names: tuple[str, ...]
    numbers: TableRows
    map: MapSource | None
    """None: a plain table."""

    @property
    def rows(self) -> int:
        """``num_embeddings``."""
        return self.numbers.rows

    @property
    def dim(self) -> int:
        """Embedding dimension."""
        return self.numbers.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionSource:
    """A whole module: its tables in config order."""

    module: nn.Module
    tables: tuple[TableSource, ...]
    managed: bool
    """True for a ManagedCollisionEmbeddingCollection."""
    need_indices: bool = False

    @property
    def dim(self) -> int:
        """Embedding dimension, the same for all tables."""
        return self.tables[0].dim
