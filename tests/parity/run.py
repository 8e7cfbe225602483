"""The suite against a running server: every request once and compared, then all of them again as one stream."""

import hashlib
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.parity.answers import Collection
from tests.parity.requests import Request, draw_requests
from tests.parity.wire import Clients

Digest = dict[str, bytes]
"""Of every output that came back: hash of its dtype, shape and bytes."""


@dataclass
class Run:
    """Collections, their requests, and what the server answered to each the first time."""

    collections: Mapping[str, Collection]
    clients: Clients
    requests: dict[str, list[Request]] = field(default_factory=dict)
    answered: dict[tuple[str, int], Digest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, collection in self.collections.items():
            known, strange = collection.pools()
            self.requests[name] = draw_requests(collection.manifest.features, known, strange, seed=sum(name.encode()))

    def check(self, name: str) -> int:
        """Send every request of a collection and compare each answer; how many there were."""
        for at, request in enumerate(self.requests[name]):
            answer = self.clients.infer(name, request)
            self.answered[name, at] = digest(answer)
            compare(self.collections[name], request, answer)
        return len(self.requests[name])

    def stream(self, seed: int, threads: int) -> list[str]:
        """Send everything once more, in another order and at once; requests whose answers are not what they were."""
        cases = list(self.answered)
        random.Random(seed).shuffle(cases)

        def send(case: tuple[str, int]) -> str | None:
            name, at = case
            request = self.requests[name][at]
            same = digest(self.clients.infer(name, request)) == self.answered[case]
            return None if same else f"{name}: {request.name}"

        with ThreadPoolExecutor(threads) as pool:
            return [fault for fault in pool.map(send, cases) if fault is not None]


def digest(answer: Mapping[str, NDArray]) -> Digest:
    """The order of unique rows says nothing, and goes by which copy of a table was asked: they count as what they mean."""
    seen = dict(answer)
    if "unique_embeddings" in seen:
        unique, inverse = seen["unique_embeddings"], seen.pop("inverse")
        seen["unique_embeddings"] = unique[inverse]
        seen["number of unique rows"] = np.array(len(unique))
    return {
        name: hashlib.sha256(repr((array.dtype, array.shape)).encode() + array.tobytes()).digest()
        for name, array in seen.items()
    }


def compare(collection: Collection, request: Request, answer: dict[str, NDArray]) -> None:
    """Fail unless the answer is the oracle's: bit for bit, numbers of int8 rows within their bound."""
    expected = collection.expected(request)
    place = f"{collection.name}: {request.name}"
    assert set(answer) == set(request.outputs or collection.default_outputs(request)), place
    max_error = expected.pop("max_error")
    if request.half:
        expected["embeddings"] = expected["embeddings"].astype(np.float16)
    if "unique_embeddings" in answer:
        unique, inverse = answer.pop("unique_embeddings"), answer.pop("inverse")
        assert inverse.dtype == np.int64, place
        assert np.array_equal(np.unique(inverse), np.arange(len(unique))), f"{place}: a unique row that no one uses"
        assert same_bits(unique[inverse], answer["embeddings"]), place
    if max_error.any() and "embeddings" in answer:
        assert answer["embeddings"].shape == expected["embeddings"].shape, place
        slack = np.abs(expected["embeddings"].astype(np.float32)) * np.float32(2**-10) if request.half else 0
        error = np.abs(answer["embeddings"].astype(np.float32) - expected["embeddings"].astype(np.float32))
        assert (error <= max_error + slack).all(), f"{place}: off by {(error - max_error).max()} more than stated"
        answer.pop("embeddings")
    for name, array in answer.items():
        assert same_bits(array, expected[name]), f"{place}: {name}\n{difference(array, expected[name])}"


def same_bits(left: NDArray, right: NDArray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def difference(found: NDArray, expected: NDArray) -> str:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}"
    rows = np.flatnonzero((found != expected).reshape(len(found), -1).any(1))
    at = rows[0] if rows.size else 0
    return f"{rows.size} of {len(found)} differ, first at {at}: {found[at]}, expected {expected[at]}"
