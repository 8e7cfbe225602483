"""Owns the values that cross the dataplane's border; knows no protocol.

Shape suffixes, used all over the front tier:

    N  ids of a request (or batch)      F  features           B  batch size of the KJT
    M  rows of the reply                E  embedding names    U  unique ids
    D  embedding dimension              T  tables of a shard  S  shards
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Output(StrEnum):
    """An output that a request may ask for, by its name on the wire."""

    EMBEDDINGS = "embeddings"
    OUTPUT_LENGTHS = "output_lengths"
    ROW_IDS = "row_ids"
    HITS = "hits"
    UNIQUE_EMBEDDINGS = "unique_embeddings"
    INVERSE = "inverse"
    MISSING = "missing"
    WEIGHTS = "weights"
    INDICES = "indices"


class OnShardFailure(StrEnum):
    """What a request gets when a shard that it needs does not answer."""

    FAIL = "fail"
    """An error that names the shard."""
    ZERO = "zero"
    """Rows of zeros where that shard's answers belong, marked in ``missing``."""


class OutputDtype(StrEnum):
    """Number format of embeddings on the wire."""

    FP32 = "FP32"
    FP16 = "FP16"


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupRequest:
    """A KeyedJaggedTensor lookup, as either edge reads it off the wire; not yet held against a manifest."""

    collection: str
    version: int | None = None
    """A pinned version; None: the one being served."""
    request_id: str = ""
    keys: tuple[str, ...] | None = None
    """Feature names in the order of ``values``; None: the manifest's order."""
    values_N: NDArray[np.int64]
    """Raw ids, feature-major, already widened to INT64 by the edge."""
    lengths_FB: NDArray[np.int64]
    """Flat [F·B], or [F, B]; flat [sum(stride_per_key)] with strides. Widened to INT64 by the edge, not yet checked for
    sign or sum."""
    weights_N: NDArray[np.float32] | None = None
    """One number for each id, carried to the reply."""
    stride_per_key_F: NDArray[np.int64] | None = None
    """Variable batch per feature: how many samples each feature has; None: all have B."""
    inverse_indices_FB: NDArray[np.int64] | None = None
    """Flat [F·B], or [F, B]: which of a feature's samples each sample of the full batch is; None: the reply keeps each
    feature's own samples. TorchRec's ``KeyedJaggedTensor.inverse_indices``, in the order of ``keys``."""
    outputs: frozenset[Output] | None = None
    """None: the defaults, which are the embeddings, the weights if there are any, and the indices if the collection
    needs them."""
    on_shard_failure: OnShardFailure = OnShardFailure.FAIL
    output_dtype: OutputDtype = OutputDtype.FP32
    timeout_s: float | None = None
    """The client's deadline from now; None: the server's default. The server's maximum caps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupReply:
    """The answer to one request; arrays are C-contiguous and may be views of a larger buffer."""

    collection: str
    version: int
    request_id: str
    embedding_names_E: tuple[str, ...]
    """Blocks of the reply in order: the request's key order, then embedding-name order."""
    lengths_E: tuple[NDArray[np.int64], ...]
    """Per block: how many rows each of its samples has, [B]; B may differ from block to block."""
    outputs: Mapping[Output, NDArray[Any]]
    """Just the outputs asked for, in the order of ``Output``: ``embeddings`` [M, D] FP32 or FP16, ``output_lengths``
    INT32 [E·B], ``row_ids`` INT64 [M], ``hits`` BOOL [M], ``unique_embeddings`` [U, D], ``inverse`` INT64 [M],
    ``missing`` BOOL [M], ``weights`` FP32 [M], ``indices`` INT64 [M]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionInfo:
    """What an edge needs to describe a collection: metadata, config and the OpenAPI page."""

    name: str
    versions: tuple[int, ...]
    """Versions being served, oldest first."""
    default_version: int
    """The one that answers when a request names none."""
    features: tuple[str, ...]
    dim: int
    need_indices: bool = False
    """Whether ``indices`` may be asked for, and are among the default outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Whether requests can be answered, and if not, what stands in the way."""

    ready: bool
    reasons: tuple[str, ...] = ()
    """One line for each obstacle; names the shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionStatistics:
    """Counts since start, for the protocol's statistics call."""

    success_count: int
    success_ns: int
    fail_count: int
    fail_ns: int
    ids_count: int
