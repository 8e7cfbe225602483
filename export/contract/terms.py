"""Owns the words of the contract: constants, the choices that a manifest names, and how strictly it is read."""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

INT64_MAX = (1 << 63) - 1
SENTINEL_IDS = (-1, INT64_MAX)
"""Ids that never name a row of a managed-collision table: the hash table's and MCH's marks of an empty slot."""

NO_ROW = -1
"""The row id of an answer that is no row of the table (``zero``)."""

Count = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """Frozen, no type is bent to fit, and a field that nobody declared is an error: writer and readers cannot drift apart."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Kind(StrEnum):
    """What a version's files hold."""

    BASE = "base"
    """Everything: a version of a Triton model of its own."""
    DELTA = "delta"
    """What differs from its base, cumulative: an overlay that the base's process looks up first."""


class Remap(StrEnum):
    """How a raw id becomes a row."""

    NONE = "none"
    """The id is the row."""
    MCH = "mch"
    """TorchRec's ``MCHManagedCollisionModule``: a learned id → row map."""
    MPZCH = "mpzch"
    """TorchRec's ``HashZchManagedCollisionModule``: multi-probe hashing into buckets of an identity table."""


class Routing(StrEnum):
    """Which shard holds an id."""

    TABLE = "table"
    """The one shard that holds the table."""
    ROWS = "rows"
    """The shard whose row range holds the id (row-wise)."""
    COLUMNS = "columns"
    """Every shard that holds columns of the table; the pieces are joined in column order (column-wise)."""
    REPLICATED = "replicated"
    """Any of the shards, each of which holds the whole table, chosen to spread the load (data-parallel)."""
    TRAINING = "training"
    """The shard that holds the id's training bucket, by TorchRec's own rule: ``Table.training``."""
    HASH = "hash"
    """``mix64(id) mod num_shards``, see ``export.contract.routing``."""


class RowDtype(StrEnum):
    """How a shard stores rows."""

    FP32 = "fp32"
    FP16 = "fp16"
    """IEEE half precision, rounded to nearest."""
    INT8 = "int8"
    """Row-wise: UINT8 numbers and each row's own FP32 scale and bias over the whole row; number = byte · scale + bias."""


class Runtime(StrEnum):
    """What of Triton runs a shard."""

    PYTHON = "python"
    """The Python backend with ``shard.pt2``; state is memory-mapped from ``state.safetensors``."""
    PYTORCH = "pytorch"
    """The ``pytorch_libtorch`` platform with ``model.pt``, which holds its own state."""


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
