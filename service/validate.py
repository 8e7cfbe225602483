"""Owns holding a request against the manifest and the limits, before any work; pure functions, no I/O.

Every refusal names the field, the value and the rule. The edges have already dealt with what is protocol: names of
tensors, dtypes on the wire, bytes against shapes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.catalog import ServedTable, ServedVersion
from service.errors import InvalidArgument, NotFound, TooLarge
from service.types import LookupRequest, Output, OutputDtype

WORK_BYTES_PER_ID = 200
"""An id as it is grouped, sorted for dedup and by shard, located, and built into messages: about 25 times an INT64."""
WORK_BYTES_PER_NUMBER = 16
"""A number of a unique row, in a shard's message, its parsed copy and the batch's buffer, with some to spare."""


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
    lengths_B: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """A request that can be answered."""

    request: LookupRequest
    segments_E: tuple[Segment, ...]
    """Blocks in the reply's order: the request's key order, then embedding-name order."""
    num_ids: int
    """Ids over all segments: M of the reply."""
    reply_bytes: int
    """Predicted size of the reply's tensors."""
    work_bytes: int
    """Most memory that answering takes beside request and reply: ids, positions and rows on their way."""


def validate(request: LookupRequest, version: ServedVersion, limits: Limits) -> ValidRequest:
    """Hold a request against the version that will answer it.

    Raises:
        InvalidArgument: A rule is broken; the message names the field, the value and the rule.
        NotFound: A key is no feature of the collection.
        TooLarge: Too many ids, or the reply would be too large.
    """
    if request.lengths_FB.size > limits.max_ids:
        raise TooLarge(f"lengths: {request.lengths_FB.size} entries, the limit is {limits.max_ids} in one request")
    keys = _check_keys(request.keys, version)
    lengths_FB = _check_lengths(request.lengths_FB, keys, request.values_N.size)
    if request.values_N.size > limits.max_ids:
        raise TooLarge(f"values: {request.values_N.size} ids, the limit is {limits.max_ids} in one request")
    segments: list[Segment] = []
    stops_F = np.cumsum(lengths_FB.sum(axis=1))
    for f, key in enumerate(keys):
        values_N = request.values_N[stops_F[f] - lengths_FB[f].sum() : stops_F[f]]
        for block in version.blocks[key]:
            _check_range(version.tables[block.table], key, values_N)
            segments.append(
                Segment(
                    table=block.table,
                    embedding_name=block.embedding_name,
                    values_N=values_N,
                    lengths_B=lengths_FB[f],
                )
            )
    num_ids = sum(segment.values_N.size for segment in segments)
    reply_bytes = predict_reply_bytes(
        request, num_ids=num_ids, dim=version.dim, lengths=len(segments) * lengths_FB.shape[1]
    )
    if reply_bytes > limits.max_reply_bytes:
        raise TooLarge(
            f"values: {num_ids} rows of {version.dim} make a reply of {reply_bytes} bytes, "
            f"the limit is {limits.max_reply_bytes}; ask for fewer ids at a time"
        )
    return ValidRequest(
        request=request,
        segments_E=tuple(segments),
        num_ids=num_ids,
        reply_bytes=reply_bytes,
        work_bytes=num_ids * (WORK_BYTES_PER_ID + WORK_BYTES_PER_NUMBER * version.dim),
    )


def predict_reply_bytes(request: LookupRequest, *, num_ids: int, dim: int, lengths: int) -> int:
    """Upper bound of a reply's tensor bytes, from the request alone: the unique form may turn out smaller.

    Args:
        request: The request.
        num_ids: Rows of the reply.
        dim: Numbers in a row.
        lengths: Entries of ``output_lengths``, E·B.
    """
    row_bytes = dim * (2 if request.output_dtype is OutputDtype.FP16 else 4)
    per_id: Mapping[Output, int] = {
        Output.EMBEDDINGS: row_bytes,
        Output.UNIQUE_EMBEDDINGS: row_bytes,
        Output.ROW_IDS: 8,
        Output.INVERSE: 8,
        Output.HITS: 1,
        Output.MISSING: 1,
    }
    return num_ids * sum(per_id.get(output, 0) for output in request.outputs) + 4 * lengths


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


def _check_lengths(lengths: NDArray[np.int64], keys: tuple[str, ...], num_values: int) -> NDArray[np.int64]:
    """The lengths as [F, B], or the rule that they break."""
    features = len(keys)
    if lengths.ndim == 2 and lengths.shape[0] != features:
        raise InvalidArgument(f"lengths: shape {list(lengths.shape)}, but there are {features} keys; use [F, B]")
    if lengths.ndim not in {1, 2} or lengths.size % features:
        raise InvalidArgument(
            f"lengths: shape {list(lengths.shape)} is not [F*B] or [F, B] for the {features} keys {list(keys)}"
        )
    lengths_FB = lengths.reshape(features, lengths.size // features)
    if lengths_FB.size:
        f, b = np.unravel_index(lengths_FB.argmin(), lengths_FB.shape)
        if lengths_FB[f, b] < 0:
            raise InvalidArgument(f"lengths: {lengths_FB[f, b]} for key {keys[f]!r}, sample {b}; a length is 0 or more")
        f, b = np.unravel_index(lengths_FB.argmax(), lengths_FB.shape)
        if lengths_FB[f, b] > num_values:
            raise InvalidArgument(
                f"lengths: {lengths_FB[f, b]} for key {keys[f]!r}, sample {b}, but there are only {num_values} values"
            )
    total = int(lengths_FB.sum())
    if total != num_values:
        raise InvalidArgument(f"lengths: they add up to {total}, but there are {num_values} values")
    return lengths_FB


def _check_range(table: ServedTable, key: str, values_N: NDArray[np.int64]) -> None:
    if not table.rejects_out_of_range or not values_N.size:
        return
    outside = (values_N < 0) | (values_N >= table.rows)
    if outside.any():
        at = int(outside.argmax())
        raise InvalidArgument(
            f"values: id {values_N[at]} at place {at} of key {key!r}; table {table.name!r} has rows 0 to {table.rows - 1}"
        )
