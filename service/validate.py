"""Owns holding a request against the manifest and the limits, before any work; pure functions, no I/O.

Every refusal names the field, the value and the rule. The edges have already dealt with what is protocol: names of
tensors, dtypes on the wire, bytes against shapes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.catalog import ServedTable, ServedVersion
from service.errors import InvalidArgument, NotFound, TooLarge
from service.samples import Samples, cut_samples
from service.types import LookupRequest, Output, OutputDtype

WORK_BYTES_PER_ID = 200
"""An id as it is grouped, sorted for dedup and by shard, located, and built into messages: about 25 times an INT64."""
WORK_BYTES_PER_NUMBER = 16
"""A number of a unique row, in a shard's message, its parsed copy and the batch's buffer, with some to spare."""
WRITE_OUT_BYTES = 48
"""A sample or an id that is written out from a variable batch: its place, its value, its weight, and sums on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Size limits on one request."""

    max_ids: int
    max_reply_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One block of a reply: the ids of one feature, to be looked up in one table."""

    table: int
    embedding_name: str
    values_N: NDArray[np.int64]
    weights_N: NDArray[np.float32] | None
    lengths_B: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """A request that can be answered; its sizes are those of the request written out, if its batch is variable."""

    request: LookupRequest
    outputs: frozenset[Output]
    """What the reply must have."""
    segments_E: tuple[Segment, ...]
    """Blocks in the reply's order: the request's key order, then embedding-name order."""
    num_ids: int
    """Ids over all segments: M of the reply."""
    reply_bytes: int
    """Predicted size of the reply's tensors."""
    work_bytes: int
    """Most memory that answering takes beside request and reply: ids, positions and rows on their way."""

    @property
    def must_be_written_out(self) -> bool:
        """Whether ``service.samples.write_out`` has to be called on the request, and the result validated in its place."""
        return self.request.inverse_indices_FB is not None


def validate(request: LookupRequest, version: ServedVersion, limits: Limits) -> ValidRequest:
    """Hold a request against the version that will answer it.

    Takes next to no memory, however much a variable batch is going to be written out to.

    Raises:
        InvalidArgument: A rule is broken; the message names the field, the value and the rule.
        NotFound: A key is no feature of the collection.
        TooLarge: Too many ids, or the reply would be too large.
    """
    keys = _check_keys(request.keys, version)
    samples = cut_samples(request, keys, limits.max_ids)
    if request.values_N.size > limits.max_ids:
        raise TooLarge(f"values: {request.values_N.size} ids, the limit is {limits.max_ids} in one request")
    _check_weights(request)
    outputs = _choose_outputs(request, version)
    blocks_F = np.array([len(version.blocks[key]) for key in keys])
    num_ids = int(blocks_F @ samples.written_ids_F)
    num_lengths = int(blocks_F @ samples.written_lengths_F)
    reply_bytes = predict_reply_bytes(
        outputs, request.output_dtype, num_ids=num_ids, dim=version.dim, num_lengths=num_lengths
    )
    if reply_bytes > limits.max_reply_bytes:
        raise TooLarge(
            f"values: {num_ids} rows of {version.dim} make a reply of {reply_bytes} bytes, "
            f"the limit is {limits.max_reply_bytes}; ask for fewer ids at a time"
        )
    work_bytes = num_ids * (WORK_BYTES_PER_ID + WORK_BYTES_PER_NUMBER * version.dim)
    if request.inverse_indices_FB is not None:
        work_bytes += (sum(samples.written_ids_F) + sum(samples.written_lengths_F)) * WRITE_OUT_BYTES
    return ValidRequest(
        request=request,
        outputs=outputs,
        segments_E=tuple(_cut_segments(request, keys, samples, version)),
        num_ids=num_ids,
        reply_bytes=reply_bytes,
        work_bytes=work_bytes,
    )


def predict_reply_bytes(
    outputs: AbstractSet[Output], dtype: OutputDtype, *, num_ids: int, dim: int, num_lengths: int
) -> int:
    """Upper bound of a reply's tensor bytes, from the request alone: the unique form may turn out smaller.

    Args:
        outputs: What the reply must have.
        dtype: Number format of its embeddings.
        num_ids: Rows of the reply.
        dim: Numbers in a row.
        num_lengths: Entries of ``output_lengths``.
    """
    row_bytes = dim * (2 if dtype is OutputDtype.FP16 else 4)
    per_id: Mapping[Output, int] = {
        Output.EMBEDDINGS: row_bytes,
        Output.UNIQUE_EMBEDDINGS: row_bytes,
        Output.ROW_IDS: 8,
        Output.INVERSE: 8,
        Output.HITS: 1,
        Output.MISSING: 1,
        Output.WEIGHTS: 4,
        Output.INDICES: 8,
    }
    return num_ids * sum(per_id.get(output, 0) for output in outputs) + 4 * num_lengths


def _cut_segments(
    request: LookupRequest, keys: Sequence[str], samples: Samples, version: ServedVersion
) -> Iterator[Segment]:
    for f, key in enumerate(keys):
        part = slice(samples.stops_F1[f], samples.stops_F1[f + 1])
        values_N = request.values_N[part]
        weights_N = None if request.weights_N is None else request.weights_N[part]
        for block in version.blocks[key]:
            _check_range(version.tables[block.table], key, values_N)
            yield Segment(
                table=block.table,
                embedding_name=block.embedding_name,
                values_N=values_N,
                weights_N=weights_N,
                lengths_B=samples.lengths_F[f],
            )


def _check_weights(request: LookupRequest) -> None:
    if request.weights_N is not None and request.weights_N.shape != request.values_N.shape:
        raise InvalidArgument(
            f"weights: {request.weights_N.size} numbers, but there are {request.values_N.size} values; send one for each"
        )


def _choose_outputs(request: LookupRequest, version: ServedVersion) -> frozenset[Output]:
    """The outputs asked for, or the defaults; nothing that was sent or is needed is dropped in silence."""
    has_weights = request.weights_N is not None
    if request.outputs is None:
        extra = {Output.WEIGHTS: has_weights, Output.INDICES: version.need_indices}
        return frozenset({Output.EMBEDDINGS, *(output for output, wanted in extra.items() if wanted)})
    if has_weights and Output.WEIGHTS not in request.outputs:
        raise InvalidArgument(
            "weights: they would be dropped, since the request names its outputs and output weights is not among them; "
            "ask for it too, or leave the input out"
        )
    if not has_weights and Output.WEIGHTS in request.outputs:
        raise InvalidArgument("output weights: the request has no input weights; send them, or leave the output out")
    if Output.INDICES in request.outputs and not version.need_indices:
        raise InvalidArgument(
            f"output indices: the module of {version.collection} was not made with need_indices; ask for row_ids"
        )
    return request.outputs


def _check_keys(keys: tuple[str, ...] | None, version: ServedVersion) -> tuple[str, ...]:
    if keys is None:
        return version.features
    known, given = set(version.features), set(keys)
    unknown = [key for key in keys if key not in known]
    if unknown:
        raise NotFound(
            f"keys: {_some(unknown)} are no features of {version.collection}; it has {_some(version.features)}"
        )
    if len(given) != len(keys):
        twice = [key for key, count in Counter(keys).items() if count > 1]
        raise InvalidArgument(f"keys: {_some(twice)} are there more than once; name every feature once")
    if len(given) != len(known):
        missing = [feature for feature in version.features if feature not in given]
        raise InvalidArgument(f"keys: {_some(missing)} are missing; a feature without ids has lengths of 0")
    return keys


def _some(names: Sequence[str], most: int = 10) -> str:
    """The first few names, and how many more: an error is read by a person."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{list(names[:most])}{more}"


def _check_range(table: ServedTable, key: str, values_N: NDArray[np.int64]) -> None:
    if not table.rejects_out_of_range or not values_N.size:
        return
    outside = (values_N < 0) | (values_N >= table.rows)
    if outside.any():
        at = int(outside.argmax())
        raise InvalidArgument(
            f"values: id {values_N[at]} at place {at} of key {key!r}; table {table.name!r} has rows 0 to {table.rows - 1}"
        )
