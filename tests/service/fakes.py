"""A plane that answers with rows computed from the ids: what the edges are tested over. It validates nothing."""

import asyncio
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.admission import Admission, Permit
from service.errors import NotFound
from service.types import (
    CollectionInfo,
    CollectionStatistics,
    LookupReply,
    LookupRequest,
    Output,
    OutputDtype,
    Readiness,
)

DIM = 4
NAN_ID = 666
FEATURES = ("user", "item")


def rows_of(ids: NDArray[np.int64], dtype: Any = np.float32) -> NDArray[Any]:
    """[N, DIM]: the row that the fake gives each id."""
    rows = (ids[:, None] % 1000) * 0.5 + np.arange(DIM)
    rows[ids == NAN_ID] = np.nan
    return np.ascontiguousarray(rows, dtype=dtype)


class FakePlane:
    """Implements ``service.plane.Plane``."""

    def __init__(self, *, max_requests: int = 64, max_bytes: int = 1 << 30) -> None:
        self.admission = Admission(max_requests=max_requests, max_bytes=max_bytes)
        self.lookups: list[LookupRequest] = []
        self.cancelled = 0
        self.failure: Exception | None = None
        self.ready = Readiness(ready=True)
        self.gate: asyncio.Event | None = None
        """Lookups wait for it, when there is one."""
        self.infos = {
            "clicks": CollectionInfo(name="clicks", versions=(1, 2), default_version=2, features=FEATURES, dim=DIM),
            "ads": CollectionInfo(name="ads", versions=(7,), default_version=7, features=("ad",), dim=DIM),
        }

    def reset(self) -> None:
        """Back to how it was made, for the next test on the same server."""
        assert self.admission.inflight_requests == 0, "a permit was not given back"
        self.lookups.clear()
        self.cancelled, self.failure, self.gate, self.ready = 0, None, None, Readiness(ready=True)

    def admit(self, nbytes: int = 0) -> Permit:
        return self.admission.admit(nbytes)

    async def lookup(self, request: LookupRequest, permit: Permit) -> LookupReply:
        self.lookups.append(request)
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.failure is not None:
            raise self.failure
        info = self.collection(request.collection, request.version)
        return answer(request, info, request.version or info.default_version)

    def collections(self) -> tuple[CollectionInfo, ...]:
        return tuple(self.infos.values())

    def collection(self, name: str, version: int | None = None) -> CollectionInfo:
        if name not in self.infos:
            raise NotFound(f"collection {name!r} is not served")
        info = self.infos[name]
        if version is not None and version not in info.versions:
            raise NotFound(f"version {version} of {name} is not served")
        return info

    def statistics(self, name: str) -> CollectionStatistics:
        self.collection(name)
        return CollectionStatistics(success_count=5, success_ns=500, fail_count=1, fail_ns=10, ids_count=50)

    def readiness(self, name: str | None = None, version: int | None = None) -> Readiness:
        if name is not None:
            self.collection(name, version)
        return self.ready


def answer(request: LookupRequest, info: CollectionInfo, version: int) -> LookupReply:
    ids = request.values_N
    keys = request.keys if request.keys is not None else info.features
    lengths = request.lengths_FB.reshape(-1)
    strides = request.stride_per_key_F
    edges = [lengths.size // len(keys)] * (len(keys) - 1) if strides is None else strides[:-1]
    dtype = np.float16 if request.output_dtype is OutputDtype.FP16 else np.float32
    unique, inverse = np.unique(ids, return_inverse=True)
    everything = {
        Output.EMBEDDINGS: rows_of(ids, dtype),
        Output.OUTPUT_LENGTHS: lengths.astype(np.int32),
        Output.ROW_IDS: ids.copy(),
        Output.HITS: ids >= 0,
        Output.UNIQUE_EMBEDDINGS: rows_of(unique, dtype),
        Output.INVERSE: inverse.astype(np.int64),
        Output.MISSING: np.zeros(ids.shape, dtype=np.bool_),
        Output.WEIGHTS: request.weights_N,
        Output.INDICES: ids.copy(),
    }
    wanted = request.outputs
    if wanted is None:
        wanted = {Output.EMBEDDINGS} | ({Output.WEIGHTS} if request.weights_N is not None else set())
    return LookupReply(
        collection=request.collection,
        version=version,
        request_id=request.request_id,
        embedding_names_E=keys,
        lengths_E=tuple(np.split(lengths, np.cumsum(edges, dtype=np.int64))),
        outputs={output: everything[output] for output in Output if output in wanted},
    )
