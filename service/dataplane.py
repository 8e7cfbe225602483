"""Owns a request's way through the front tier: admit → validate → batch → (fan out) → reply; knows no protocol."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import structlog

from service.admission import Admission, Permit
from service.batcher import Batcher
from service.catalog import ServedVersion
from service.errors import DeadlineExceeded, Internal, InvalidArgument, LookupFailed, NotFound
from service.fanout import Pending
from service.health import ShardHealth
from service.metrics import Metrics
from service.samples import write_out
from service.settings import Settings
from service.types import CollectionInfo, CollectionStatistics, LookupReply, LookupRequest, Readiness
from service.validate import Limits, ValidRequest, validate

log = structlog.get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

VALIDATE_INLINE = 1 << 18
"""Ids and lengths up to which a request is validated, or written out, on the event loop."""


@dataclass(slots=True, kw_only=True, eq=False)
class Served:
    """One version being served, and what serves it."""

    version: ServedVersion
    health: tuple[ShardHealth, ...]
    batcher: Batcher[Pending, LookupReply]
    requests: int = 0
    """Requests that it is answering."""


@dataclass(slots=True)
class _Counts:
    """Sums for the protocol's statistics call."""

    success: int = 0
    success_ns: int = 0
    fail: int = 0
    fail_ns: int = 0
    ids: int = 0


@dataclass(slots=True)
class _Collection:
    """The versions of one collection that requests may name, and the one they get when they name none."""

    current: int
    served: dict[int, Served]
    counts: _Counts = field(default_factory=_Counts)
    evictions: dict[str, int] = field(default_factory=dict)
    """By table: the most that a version served so far has counted."""


class DataPlane:
    """Answers lookups; implements ``service.plane.Plane``.

    Args:
        settings: Limits and deadlines.
        metrics: Where requests in flight and versions are shown.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._limits = Limits(max_ids=settings.max_ids, max_reply_bytes=settings.max_reply_bytes)
        self._admission = Admission(
            max_requests=settings.max_inflight_requests,
            max_bytes=settings.max_inflight_bytes,
            max_reading=settings.max_reading_requests,
        )
        metrics.inflight_requests.set_function(lambda: self._admission.inflight_requests)
        self._collections: dict[str, _Collection] = {}
        self._draining = False

    def serve(self, served: Served, *, rolled_back: bool = False) -> None:
        """Make a version the one that answers; one assignment, so no request sees a mixture.

        Args:
            served: The version; those that answered before go on answering requests that name them.
            rolled_back: Whether it is an older one, taken up again.
        """
        name, version = served.version.collection, served.version.version
        collection = self._collections.setdefault(name, _Collection(current=version, served={}))
        collection.served[version] = served
        collection.current = version
        self._metrics.version.labels(name).set(version)
        self._metrics.version_created.labels(name).set(served.version.created_s)
        self._metrics.overlay_bytes.labels(name).set(served.version.overlay_bytes)
        for result in ("ok", "failed", "rolled_back"):
            self._metrics.version_switches.labels(name, result)  # there from the start, at 0
        self._metrics.version_switches.labels(name, "rolled_back" if rolled_back else "ok").inc()
        for table in served.version.tables:
            for counter in (
                self._metrics.ids,
                self._metrics.unique_ids,
                self._metrics.hot_ids,
                self._metrics.evictions,
            ):
                counter.labels(name, table.name)
            counted = collection.evictions.setdefault(table.name, table.evictions)
            self._metrics.evictions.labels(name, table.name).inc(max(0, table.evictions - counted))
            collection.evictions[table.name] = max(counted, table.evictions)

    def serving(self, name: str) -> tuple[int | None, Mapping[int, Served]]:
        """The version of a collection that answers, and all that requests may name; None and nothing if there is none."""
        collection = self._collections.get(name)
        return (None, {}) if collection is None else (collection.current, dict(collection.served))

    def retire(self, name: str, version: int) -> Served:
        """Let no request name a version any more; it is not the one that answers. It may still be answering some."""
        collection = self._collections[name]
        assert version != collection.current, version
        return collection.served.pop(version)

    def drain(self) -> None:
        """Say not ready from now on, while still answering."""
        self._draining = True

    @property
    def inflight_requests(self) -> int:
        """Requests admitted and not yet answered."""
        return self._admission.inflight_requests

    def admit(self, nbytes: int = 0) -> Permit:
        """See ``Plane.admit``."""
        return self._admission.admit(nbytes)

    async def lookup(self, request: LookupRequest, permit: Permit) -> LookupReply:
        """See ``Plane.lookup``."""
        collection = self._find(request.collection)
        started = time.perf_counter_ns()
        try:
            reply, num_ids = await self._answer(collection, request, permit)
        except Exception as exc:
            collection.counts.fail += 1
            collection.counts.fail_ns += time.perf_counter_ns() - started
            if isinstance(exc, LookupFailed):
                raise
            log.exception("lookup_broken", collection=request.collection)
            raise Internal(f"lookup failed: {exc!r}") from exc
        collection.counts.success += 1
        collection.counts.success_ns += time.perf_counter_ns() - started
        collection.counts.ids += num_ids
        return reply

    async def _answer(self, collection: _Collection, request: LookupRequest, permit: Permit) -> tuple[LookupReply, int]:
        served = self._pick(request.collection, collection, request.version)
        served.requests += 1
        try:
            return await self._answer_from(served, request, permit)
        finally:
            served.requests -= 1

    async def _answer_from(self, served: Served, request: LookupRequest, permit: Permit) -> tuple[LookupReply, int]:
        permit.work()
        timeout_s = self._timeout(request.timeout_s)
        now = asyncio.get_running_loop().time()
        deadline = (now if permit.received_at is None else permit.received_at) + timeout_s
        valid = await self._validate(request, served.version)
        permit.grow(valid.reply_bytes + valid.work_bytes)
        if valid.must_be_written_out:
            written = await _run(_size(request) + valid.num_ids, write_out, request)
            valid = await self._validate(written, served.version)
        try:
            async with asyncio.timeout_at(deadline):
                reply = await served.batcher.submit(
                    Pending(valid=valid, timeout_s=timeout_s, deadline=deadline), weight=max(valid.num_ids, 1)
                )
        except TimeoutError as exc:
            raise DeadlineExceeded(
                f"not answered within {timeout_s:.3f} s; ask for fewer ids or give it longer"
            ) from exc
        return reply, valid.num_ids

    async def _validate(self, request: LookupRequest, version: ServedVersion) -> ValidRequest:
        return await _run(_size(request), validate, request, version, self._limits)

    def collections(self) -> tuple[CollectionInfo, ...]:
        """See ``Plane.collections``."""
        return tuple(self.collection(name) for name in sorted(self._collections))

    def collection(self, name: str, version: int | None = None) -> CollectionInfo:
        """See ``Plane.collection``."""
        collection = self._find(name)
        served = self._pick(name, collection, version).version
        return CollectionInfo(
            name=name,
            versions=tuple(sorted(collection.served)),
            default_version=collection.current,
            features=served.features,
            dim=served.dim,
            need_indices=served.need_indices,
        )

    def statistics(self, name: str) -> CollectionStatistics:
        """See ``Plane.statistics``."""
        counts = self._find(name).counts
        return CollectionStatistics(
            success_count=counts.success,
            success_ns=counts.success_ns,
            fail_count=counts.fail,
            fail_ns=counts.fail_ns,
            ids_count=counts.ids,
        )

    def readiness(self, name: str | None = None, version: int | None = None) -> Readiness:
        """See ``Plane.readiness``."""
        if self._draining:
            return Readiness(ready=False, reasons=("shutting down",))
        if name is not None:
            chosen: Mapping[str, Served] = {name: self._pick(name, self._find(name), version)}
        else:
            chosen = {key: value.served[value.current] for key, value in self._collections.items()}
        if not chosen:
            return Readiness(ready=False, reasons=("no collection is being served",))
        reasons = tuple(
            f"shard {health.model} of {key}: {health.reason}"
            for key, served in sorted(chosen.items())
            for health in served.health
            if health.reason is not None
        )
        return Readiness(ready=not reasons, reasons=reasons)

    def _find(self, name: str) -> _Collection:
        try:
            return self._collections[name]
        except KeyError:
            raise NotFound(f"collection {name!r} is not served; there are {sorted(self._collections)}") from None

    @staticmethod
    def _pick(name: str, collection: _Collection, version: int | None) -> Served:
        try:
            return collection.served[collection.current if version is None else version]
        except KeyError:
            raise NotFound(
                f"version {version} of {name} is not served; there are {sorted(collection.served)}"
            ) from None

    def _timeout(self, asked_s: float | None) -> float:
        if asked_s is None:
            return min(self._settings.default_timeout_s, self._settings.max_timeout_s)
        if not asked_s > 0:
            raise InvalidArgument(f"timeout: {asked_s} s; it must be more than 0")
        return min(asked_s, self._settings.max_timeout_s)


def _size(request: LookupRequest) -> int:
    inverse_FB = request.inverse_indices_FB
    return request.values_N.size + request.lengths_FB.size + (0 if inverse_FB is None else inverse_FB.size)


async def _run(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``work`` on so many ids and lengths, in a thread when they are many."""
    if size <= VALIDATE_INLINE:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
