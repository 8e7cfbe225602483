"""Awkward requests, generated: what a client may put into one request, covered in pairs, for any collection.

Shape suffixes: F keys of a request, B samples, N ids, M rows of the reply.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.parity.pairs import Choice, cover

DIMENSIONS = {
    "ids": ("any", "known", "strange", "equal", "none"),
    "batch": (0, 1, 3, 17),
    "values_dtype": (np.int64, np.int32),
    "lengths_dtype": (np.int64, np.int32),
    "lengths_flat": (True, False),
    "keys": ("any", "reversed", "default"),
    "variable": ("no", "strides", "inverse"),
    "weights": (False, True),
    "outputs": ("default", "rows", "unique", "everything"),
    "half": (False, True),
    "protocol": ("http", "grpc"),
}
LARGE = 30_000
"""Ids of the largest requests."""
ROUNDS = 2
"""How often each choice is drawn, with other ids and lengths each time."""


def refuse(choice: Choice) -> str | None:
    if choice["batch"] == 0 and choice["ids"] not in {"any", "none"}:
        return "no samples, no ids"
    if choice["variable"] != "no" and not choice["lengths_flat"]:
        return "samples of a variable number are no matrix"
    if choice["half"] and choice["outputs"] == "rows":
        return "no embeddings to halve"
    return None


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request, as its tensors."""

    name: str
    protocol: str
    keys_F: tuple[str, ...]
    send_keys: bool
    values_N: NDArray[np.integer]
    lengths: NDArray[np.integer]
    stride_per_key_F: NDArray[np.integer] | None
    inverse_indices_FB: NDArray[np.integer] | None
    weights_N: NDArray[np.float32] | None
    outputs: tuple[str, ...]
    """None named: the defaults."""
    half: bool

    @property
    def written_out(self) -> list[tuple[str, list[int], NDArray[np.int64]]]:
        """(key, lengths of its samples, places of its ids among ``values_N``), every sample as often as it is meant."""
        strides = self.stride_per_key_F
        if strides is None:
            strides = np.full(len(self.keys_F), self.lengths.size // max(len(self.keys_F), 1))
        found, flat, at, start = [], self.lengths.reshape(-1), 0, 0
        for f, (key, stride) in enumerate(zip(self.keys_F, strides.tolist(), strict=True)):
            bags = []
            for length in flat[at : at + stride].tolist():
                bags.append(np.arange(start, start + length))
                start += length
            at += stride
            if self.inverse_indices_FB is not None:
                bags = [bags[sample] for sample in self.inverse_indices_FB[f].tolist()]
            found.append((key, [len(bag) for bag in bags], np.concatenate([np.arange(0), *bags])))
        return found


def draw_requests(
    features: Sequence[str], known: Mapping[str, Sequence[int]], strange: Mapping[str, Sequence[int]], seed: int
) -> list[Request]:
    """Requests for a collection with these features in its own order; ids are drawn from each feature's two pools."""
    rng = np.random.default_rng(seed)
    choices = [(choice, None) for _ in range(ROUNDS) for choice in _choices()]
    plain = {
        "ids": "any",
        "batch": 5,
        "values_dtype": np.int64,
        "lengths_dtype": np.int64,
        "lengths_flat": True,
        "keys": "any",
        "variable": "no",
        "weights": False,
        "outputs": "everything",
        "half": False,
    }
    choices += [({**plain, "protocol": protocol}, size) for size in (1, LARGE) for protocol in DIMENSIONS["protocol"]]
    return [_draw(rng, choice, features, known, strange, num_ids=size) for choice, size in choices]


@functools.cache
def _choices() -> list[Choice]:
    return cover(DIMENSIONS, refuse)


def _draw(
    rng: np.random.Generator,
    choice: Choice,
    features: Sequence[str],
    known: Mapping[str, Sequence[int]],
    strange: Mapping[str, Sequence[int]],
    *,
    num_ids: int | None = None,
) -> Request:
    keys = {"any": rng.permutation(features).tolist(), "reversed": list(features)[::-1], "default": list(features)}
    keys_F = keys[choice["keys"]]
    batch, variable = choice["batch"], choice["variable"]
    strides = (
        rng.integers(1 if variable == "inverse" else 0, batch + 1, len(keys_F)) if batch and variable != "no" else None
    )
    if variable != "no" and strides is None:
        strides = np.zeros(len(keys_F), dtype=np.int64)
    lengths_of = [_lengths(rng, batch if strides is None else strides[f], choice["ids"]) for f in range(len(keys_F))]
    if num_ids is not None:
        lengths_of = _resize(rng, lengths_of, num_ids)
    small = choice["values_dtype"] is np.int32
    values = [
        _ids(rng, choice["ids"], known[key], strange[key], int(lengths.sum()), small=small)
        for key, lengths in zip(keys_F, lengths_of, strict=True)
    ]
    values_N = np.concatenate([np.arange(0), *values]).astype(choice["values_dtype"])
    lengths = np.concatenate([np.arange(0), *lengths_of]).astype(choice["lengths_dtype"])
    inverse = None
    if variable == "inverse":
        inverse = np.stack([rng.integers(0, max(stride, 1), batch) for stride in strides]).astype(
            choice["values_dtype"]
        )
    return Request(
        name=" ".join(f"{dimension}={getattr(value, '__name__', value)}" for dimension, value in choice.items()),
        protocol=choice["protocol"],
        keys_F=tuple(keys_F),
        send_keys=choice["keys"] != "default",
        values_N=values_N,
        lengths=lengths if choice["lengths_flat"] else lengths.reshape(len(keys_F), batch),
        stride_per_key_F=None if strides is None else strides.astype(choice["lengths_dtype"]),
        inverse_indices_FB=inverse,
        weights_N=rng.standard_normal(values_N.size, dtype=np.float32) if choice["weights"] else None,
        outputs=_outputs(choice),
        half=choice["half"],
    )


def _lengths(rng: np.random.Generator, samples: int, ids: str) -> NDArray[np.int64]:
    """Few ids a sample; one feature in four has none at all."""
    if ids == "none" or rng.integers(4) == 0:
        return np.zeros(samples, dtype=np.int64)
    return rng.integers(0, 4, samples)


def _resize(rng: np.random.Generator, lengths_of: list[NDArray[np.int64]], num_ids: int) -> list[NDArray[np.int64]]:
    shape = (len(lengths_of), lengths_of[0].size)
    counts = rng.multinomial(num_ids, np.full(shape[0] * shape[1], 1 / (shape[0] * shape[1])))
    return list(counts.reshape(shape))


def _ids(
    rng: np.random.Generator, kind: str, known: Sequence[int], strange: Sequence[int], size: int, *, small: bool
) -> NDArray[np.int64]:
    pools = {"known": np.array(known, dtype=np.int64), "strange": np.array(strange, dtype=np.int64)}
    # as many of the one kind as of the other
    both = np.concatenate([np.resize(pools["known"], max(len(known), len(strange))), pools["strange"]])
    candidates = [pools.get(kind, both), both]
    if small:
        candidates = [pool[pool == pool.astype(np.int32)] for pool in candidates]
    pool = next(pool for pool in candidates if pool.size)
    return np.full(size, rng.choice(pool)) if kind == "equal" else rng.choice(pool, size)


def _outputs(choice: Choice) -> tuple[str, ...]:
    named = {
        "default": (),
        "rows": ("hits", "row_ids"),
        "unique": ("unique_embeddings", "inverse", "embeddings"),
        "everything": ("embeddings", "output_lengths", "row_ids", "hits", "unique_embeddings", "inverse", "missing"),
    }[choice["outputs"]]
    # Weights that are sent must come back: the server refuses to drop them.
    return (*named, "weights") if named and choice["weights"] else named
