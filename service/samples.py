"""Owns how a request's ids are cut into features and samples: lengths, and with a variable batch strides and inverse indices.

Pure functions, no I/O. Every refusal names the field, the value and the rule. Shape suffixes: see ``service.types``;
``B`` may differ from feature to feature where the batch is variable.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidArgument, TooLarge
from service.types import LookupRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A request's samples by feature, as they were sent, and how many they are once written out."""

    lengths_F: tuple[NDArray[np.int64], ...]
    """Per feature: [B] ids of each of its samples."""
    stops_F1: tuple[int, ...]
    """Feature ``f`` has the values [stops[f], stops[f+1])."""
    written_ids_F: tuple[int, ...]
    """Per feature: its ids, written out by the inverse indices if there are any."""
    written_lengths_F: tuple[int, ...]
    """Per feature: its samples, written out as well."""


def cut_samples(request: LookupRequest, keys: Sequence[str], max_ids: int) -> Samples:
    """Cut a request's values into features and samples; takes no memory but that of a few arrays of lengths.

    Args:
        request: The request.
        keys: Its features, in order.
        max_ids: Most ids, and most lengths, that a request may have, as it is sent and written out.

    Raises:
        InvalidArgument: Lengths, strides or inverse indices break a rule.
        TooLarge: There are too many of them, or too many ids once they are written out.
    """
    if request.lengths_FB.size > max_ids:
        raise TooLarge(f"lengths: {request.lengths_FB.size} entries, the limit is {max_ids} in one request")
    strides_F = _check_strides(request, keys)
    edges_F1 = _edges(strides_F)
    lengths = request.lengths_FB.reshape(-1)
    _check_lengths(lengths, edges_F1, keys, request.values_N.size)
    stops_F1 = _edges(lengths)[edges_F1]
    written_ids_F, written_lengths_F = np.diff(stops_F1), strides_F
    if request.inverse_indices_FB is not None:
        picks_FB = _check_inverse(request.inverse_indices_FB, strides_F, keys, max_ids)
        written_ids_F = lengths[picks_FB + edges_F1[:-1, None]].sum(axis=1)
        written_lengths_F = np.full_like(strides_F, picks_FB.shape[1])
        if (total := int(written_ids_F.sum())) > max_ids:
            raise TooLarge(
                f"inverse_indices: written out to {picks_FB.shape[1]} samples for each key, the values are {total} ids, "
                f"the limit is {max_ids} in one request"
            )
    edges = edges_F1.tolist()
    return Samples(
        lengths_F=tuple(lengths[start:stop] for start, stop in itertools.pairwise(edges)),
        stops_F1=tuple(stops_F1.tolist()),
        written_ids_F=tuple(written_ids_F.tolist()),
        written_lengths_F=tuple(written_lengths_F.tolist()),
    )


def write_out(request: LookupRequest) -> LookupRequest:
    """The same request without a variable batch: every feature has the B samples that its inverse indices pick.

    Args:
        request: A request with inverse indices; ``cut_samples`` found nothing wrong with it.
    """
    assert request.stride_per_key_F is not None
    assert request.inverse_indices_FB is not None
    picks_FB = request.inverse_indices_FB.reshape(request.stride_per_key_F.size, -1)
    picks = (picks_FB + _edges(request.stride_per_key_F)[:-1, None]).reshape(-1)
    lengths = request.lengths_FB.reshape(-1)
    written = lengths[picks]
    # A sample's place among the values less its place among those written out; then each id's own place is added.
    shift = _edges(lengths)[picks] - _edges(written)[:-1]
    at_N = np.repeat(shift, written)
    at_N += np.arange(at_N.size)
    return replace(
        request,
        values_N=request.values_N[at_N],
        weights_N=None if request.weights_N is None else request.weights_N[at_N],
        lengths_FB=written.reshape(picks_FB.shape),
        stride_per_key_F=None,
        inverse_indices_FB=None,
    )


def _edges(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each part starts, and where the last one stops."""
    edges = np.zeros(sizes.size + 1, dtype=np.int64)
    np.cumsum(sizes, out=edges[1:])
    return edges


def _check_strides(request: LookupRequest, keys: Sequence[str]) -> NDArray[np.int64]:
    """How many samples each feature has, [F]; they add up to the number of lengths."""
    lengths, strides_F, features = request.lengths_FB, request.stride_per_key_F, len(keys)
    if strides_F is None:
        if request.inverse_indices_FB is not None:
            raise InvalidArgument("inverse_indices: sent without stride_per_key; send both, or neither")
        return np.full(features, _even_stride(lengths, keys), dtype=np.int64)
    if strides_F.shape != (features,):
        raise InvalidArgument(
            f"stride_per_key: shape {list(strides_F.shape)}, but there are {features} keys; use [F], one number for each"
        )
    for f in (int(strides_F.argmin()), int(strides_F.argmax())):
        if not 0 <= strides_F[f] <= lengths.size:
            raise InvalidArgument(
                f"stride_per_key: {strides_F[f]} for key {keys[f]!r}; a number of samples is 0 or more, "
                f"and there are {lengths.size} lengths for all keys"
            )
    if (total := int(strides_F.sum())) != lengths.size:
        raise InvalidArgument(f"stride_per_key: they add up to {total}, but there are {lengths.size} lengths")
    even = lengths.ndim == 2 and lengths.shape[0] == features and (strides_F == lengths.shape[1]).all()
    if lengths.ndim != 1 and not even:
        raise InvalidArgument(
            f"lengths: shape {list(lengths.shape)} beside a stride_per_key that differs from it; "
            f"send them flat, feature after feature: [{lengths.size}]"
        )
    return strides_F


def _even_stride(lengths: NDArray[np.int64], keys: Sequence[str]) -> int:
    """B of lengths that are [F·B] or [F, B]."""
    if lengths.ndim == 2 and lengths.shape[0] != len(keys):
        raise InvalidArgument(f"lengths: shape {list(lengths.shape)}, but there are {len(keys)} keys; use [F, B]")
    if lengths.ndim not in {1, 2} or lengths.size % len(keys):
        raise InvalidArgument(
            f"lengths: shape {list(lengths.shape)} is not [F*B] or [F, B] for the {len(keys)} keys {list(keys)}; "
            f"features with batches of their own need stride_per_key"
        )
    return lengths.size // len(keys)


def _check_lengths(
    lengths: NDArray[np.int64], edges_F1: NDArray[np.int64], keys: Sequence[str], num_values: int
) -> None:
    if lengths.size:
        at = int(lengths.argmin())
        if lengths[at] < 0:
            raise InvalidArgument(f"lengths: {lengths[at]} for {_sample(at, edges_F1, keys)}; a length is 0 or more")
        at = int(lengths.argmax())
        if lengths[at] > num_values:
            raise InvalidArgument(
                f"lengths: {lengths[at]} for {_sample(at, edges_F1, keys)}, but there are only {num_values} values"
            )
    total = int(lengths.sum())
    if total != num_values:
        raise InvalidArgument(f"lengths: they add up to {total}, but there are {num_values} values")


def _sample(at: int, edges_F1: NDArray[np.int64], keys: Sequence[str]) -> str:
    f = int(np.searchsorted(edges_F1, at, side="right")) - 1
    return f"key {keys[f]!r}, sample {at - edges_F1[f]}"


def _check_inverse(
    inverse: NDArray[np.int64], strides_F: NDArray[np.int64], keys: Sequence[str], max_ids: int
) -> NDArray[np.int64]:
    """The inverse indices as [F, B], or the rule that they break."""
    if inverse.size > max_ids:
        raise TooLarge(f"inverse_indices: {inverse.size} entries, the limit is {max_ids} in one request")
    features = len(keys)
    if inverse.ndim not in {1, 2} or inverse.size % features or (inverse.ndim == 2 and inverse.shape[0] != features):
        raise InvalidArgument(
            f"inverse_indices: shape {list(inverse.shape)}, but there are {features} keys; use [F, B] or [F*B]"
        )
    picks_FB = inverse.reshape(features, inverse.size // features)
    wrong_FB = (picks_FB < 0) | (picks_FB >= strides_F[:, None])
    if wrong_FB.any():
        f, b = np.unravel_index(wrong_FB.argmax(), wrong_FB.shape)
        raise InvalidArgument(
            f"inverse_indices: {picks_FB[f, b]} for key {keys[int(f)]!r}, sample {b}; an index is 0 or more and less than "
            f"the key's stride_per_key, {strides_F[f]}"
        )
    return picks_FB
