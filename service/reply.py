"""Owns putting a request's reply together from its batch's buffer; pure functions on arrays, no I/O, no event loop.

Must not know shards but by which rows of the buffer are missing. Shape suffixes: see ``service.types``.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from export.contract import NO_ROW
from service.batch import PreparedBatch, missing_rows
from service.dedup import dedup_ids
from service.types import LookupReply, Output, OutputDtype
from service.validate import ValidRequest

Rows = NDArray[Any]


def assemble_reply(batch: PreparedBatch, index: int, missing: AbstractSet[int] = frozenset()) -> LookupReply:
    """Undo the dedup for one request.

    Args:
        batch: The batch; all shards that the request needs have answered, but those in ``missing``.
        index: Which of the batch's requests.
        missing: Shards that failed or are late: their rows become zeros, row id −1, no hit, and ``missing``.
    """
    valid, rows_M = batch.requests[index], batch.rows_R[index]
    request, wanted = valid.request, valid.outputs
    missing_M = missing_rows(batch, rows_M, missing)
    outputs: dict[Output, Rows] = {}
    if Output.EMBEDDINGS in wanted:
        outputs[Output.EMBEDDINGS] = _gather(batch.embeddings_UD, rows_M, missing_M, request.output_dtype)
    if wanted & {Output.UNIQUE_EMBEDDINGS, Output.INVERSE}:
        outputs |= _unique_form(batch, rows_M, missing, request.output_dtype)
    if Output.OUTPUT_LENGTHS in wanted:
        outputs[Output.OUTPUT_LENGTHS] = _join([segment.lengths_B for segment in valid.segments_E], np.int32)
    if Output.ROW_IDS in wanted:
        outputs[Output.ROW_IDS] = _row_ids(batch, rows_M, missing_M)
    if Output.HITS in wanted:
        assert batch.hits_U is not None
        outputs[Output.HITS] = _fill(batch.hits_U[rows_M], missing_M, value=False)
    if Output.MISSING in wanted:
        outputs[Output.MISSING] = np.zeros(rows_M.size, dtype=np.bool_) if missing_M is None else missing_M
    if Output.WEIGHTS in wanted:
        weights = [segment.weights_N for segment in valid.segments_E if segment.weights_N is not None]
        outputs[Output.WEIGHTS] = _join(weights, np.float32)
    if Output.INDICES in wanted:
        outputs[Output.INDICES] = _indices(batch, valid, rows_M, missing_M)
    return LookupReply(
        collection=batch.version.collection,
        version=batch.version.version,
        request_id=request.request_id,
        embedding_names_E=tuple(segment.embedding_name for segment in valid.segments_E),
        lengths_E=tuple(segment.lengths_B for segment in valid.segments_E),
        outputs={output: outputs[output] for output in Output if output in wanted},
    )


def _join(parts: Sequence[Rows], dtype: Any) -> Rows:
    joined: Rows = np.concatenate([*parts, np.empty(0, dtype=dtype)]).astype(dtype, copy=False)
    return joined


def _row_ids(batch: PreparedBatch, rows_M: NDArray[np.int64], missing_M: NDArray[np.bool_] | None) -> Rows:
    assert batch.row_ids_U is not None
    return _fill(batch.row_ids_U[rows_M], missing_M, NO_ROW)


def _indices(
    batch: PreparedBatch, valid: ValidRequest, rows_M: NDArray[np.int64], missing_M: NDArray[np.bool_] | None
) -> Rows:
    """What TorchRec looks up: a plain table's id, a managed table's row; all tables of a collection are of one kind."""
    if batch.version.managed:
        return _row_ids(batch, rows_M, missing_M)
    return _join([segment.values_N for segment in valid.segments_E], np.int64)


def _gather(
    rows_UD: NDArray[np.float32], index_M: NDArray[np.int64], missing_M: NDArray[np.bool_] | None, dtype: OutputDtype
) -> Rows:
    # mode="clip": the indices are ours, and numpy's checked mode goes through a second buffer.
    return _cast(_fill(np.take(rows_UD, index_M, axis=0, mode="clip"), missing_M, 0), dtype)


def _fill(rows_M: Rows, missing_M: NDArray[np.bool_] | None, value: float) -> Rows:
    """Put ``value`` where a shard's answer is missing, in place."""
    if missing_M is not None:
        rows_M[missing_M] = value
    return rows_M


def _cast(rows_MD: NDArray[np.float32], dtype: OutputDtype) -> Rows:
    if dtype is OutputDtype.FP32:
        return rows_MD
    return torch.from_numpy(rows_MD).half().numpy()  # 20 to 50 times as fast as numpy's own cast


def _unique_form(
    batch: PreparedBatch, rows_M: NDArray[np.int64], missing: AbstractSet[int], dtype: OutputDtype
) -> dict[Output, Rows]:
    if len(batch.requests) == 1 and not missing:
        return {Output.UNIQUE_EMBEDDINGS: _cast(batch.embeddings_UD, dtype), Output.INVERSE: rows_M}
    own_U, inverse_M = dedup_ids(rows_M)
    missing_U = missing_rows(batch, own_U, missing)
    unique_UD = _gather(batch.embeddings_UD, own_U, missing_U, dtype)
    return {Output.UNIQUE_EMBEDDINGS: unique_UD, Output.INVERSE: inverse_M}
