"""Owns asking the shards of a batch and answering its requests as their shards come in; must not know the edges.

A request is answered when the shards *it* needs have answered, or when its own time is up: a slow or dead shard costs
only those who need it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

import structlog

from service.batch import PreparedBatch, place_reply, prepare_batch
from service.batcher import Entry
from service.catalog import ServedVersion
from service.errors import DeadlineExceeded, ErrorCode, Internal, LookupFailed, Overloaded, Unavailable
from service.health import ShardHealth
from service.metrics import Metrics
from service.reply import assemble_reply
from service.shards import ShardClient, ShardFailed, ShardReply
from service.types import LookupReply, OnShardFailure
from service.validate import ValidRequest

log = structlog.get_logger(__name__)
T = TypeVar("T")

MARGIN = 0.1
MAX_MARGIN_S = 0.02
"""A request is settled this share of its time, and at most so many seconds, before its deadline: what it declared for a
shard that does not answer has to reach the client in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A validated request and when it has to be answered."""

    valid: ValidRequest
    timeout_s: float
    deadline: float
    """On the event loop's clock."""

    @property
    def settle_at(self) -> float:
        """When to stop waiting for shards, on the event loop's clock."""
        return self.deadline - min(MARGIN * self.timeout_s, MAX_MARGIN_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A shard as the fan-out uses it."""

    client: ShardClient
    health: ShardHealth


class Fanout:
    """Runs batches of one served version.

    Args:
        version: What answers.
        shards: One for each of the version's shards.
        metrics: Where calls are counted.
        executor: Where tensor work of large batches runs.
        offload_ids: Ids over which a batch counts as large.
    """

    def __init__(
        self,
        version: ServedVersion,
        shards: Sequence[Shard],
        *,
        metrics: Metrics,
        executor: Executor,
        offload_ids: int,
    ) -> None:
        self._version = version
        self._shards = tuple(shards)
        self._metrics = metrics
        self._executor = executor
        self._offload_ids = offload_ids

    async def run(self, entries: Sequence[Entry[Pending, LookupReply]]) -> None:
        """Answer a batch; sets every entry's reply."""
        requests = [entry.item.valid for entry in entries]
        num_ids = sum(request.num_ids for request in requests)
        avoid = frozenset(s for s, shard in enumerate(self._shards) if shard.health.reason is not None)
        batch = await self._compute(num_ids, lambda: prepare_batch(self._version, requests, avoid=avoid))
        self._count(batch, num_ids)
        flight = _Flight(batch, entries)
        self._turn_away(flight)
        await self._answer_complete(flight)
        async with asyncio.TaskGroup() as group:
            clock = group.create_task(self._mind_deadlines(flight))
            await asyncio.gather(*(group.create_task(self._ask(flight, shard)) for shard in sorted(flight.wanted())))
            clock.cancel()

    def _turn_away(self, flight: "_Flight") -> None:
        """Settle what needs a shard that is known not to answer, before any other shard works for it in vain."""
        for shard in sorted(flight.awaited):
            reason = self._shards[shard].health.reason
            if reason is not None:
                flight.fail(shard, self._explain(shard, ShardFailed(reason)))
                flight.awaited.discard(shard)

    async def _ask(self, flight: "_Flight", shard: int) -> None:
        """Ask one shard, then answer the requests that waited for nothing else."""
        try:
            reply = await self._call(flight, shard)
        except ShardFailed as exc:
            flight.fail(shard, self._explain(shard, exc))
        except Exception as exc:  # whatever it is, it must cost nobody but those who need this shard
            log.exception("shard_call_broken", model=self._version.models_S[shard])
            flight.fail(shard, self._explain(shard, ShardFailed(repr(exc), code=ErrorCode.INTERNAL)))
        else:
            await self._compute(reply.embeddings_RW.shape[0], lambda: place_reply(flight.batch, shard, reply))
        flight.awaited.discard(shard)
        await self._answer_complete(flight)

    async def _call(self, flight: "_Flight", shard: int) -> ShardReply:
        health = self._shards[shard].health
        loop = asyncio.get_running_loop()
        started = time.perf_counter()
        failure: ShardFailed | None = None
        try:
            timeout_s = max(flight.latest_settle - loop.time(), 0.0)
            reply = await self._shards[shard].client.lookup(flight.batch.shard_request(shard), timeout_s=timeout_s)
        except ShardFailed as exc:
            failure = exc
            raise
        except asyncio.CancelledError:
            if loop.time() >= flight.latest_settle:  # nobody left: all of them gave up on this shard
                failure = ShardFailed("it did not answer in time", code=ErrorCode.DEADLINE_EXCEEDED)
            raise
        else:
            health.answered()
            return reply
        finally:
            seconds = time.perf_counter() - started
            self._metrics.shard_request_seconds.labels(self._version.collection, str(shard)).observe(seconds)
            if failure is not None:
                self._metrics.shard_errors.labels(self._version.collection, str(shard), failure.code.value).inc()
                log.warning("shard_call_failed", model=health.model, code=failure.code.value, details=failure.details)
                health.report(failure)
            del failure  # its traceback has this frame, and with it the whole batch: a cycle

    async def _mind_deadlines(self, flight: "_Flight") -> None:
        """Settle each request at its own time with what it declared for shards that have not answered by then."""
        loop = asyncio.get_running_loop()
        for index in sorted(range(len(flight.entries)), key=lambda index: flight.entries[index].item.settle_at):
            await asyncio.sleep(flight.entries[index].item.settle_at - loop.time())
            if not flight.close(index):
                continue
            late = sorted(flight.missing_for(index))
            if flight.declares_zero(index):
                await self._answer(flight, index, frozenset(late))
            else:
                names = ", ".join(f"shard {shard} ({self._version.models_S[shard]})" for shard in late)
                timeout_s = flight.entries[index].item.timeout_s
                flight.refuse(index, DeadlineExceeded(f"{names} did not answer within {timeout_s:.3f} s"))

    async def _answer_complete(self, flight: "_Flight") -> None:
        for index in flight.complete():
            await self._answer(flight, index, flight.missing_for(index))

    async def _answer(self, flight: "_Flight", index: int, missing: frozenset[int]) -> None:
        reply = flight.entries[index].reply
        if reply.done():  # its caller has gone
            return
        num_ids = flight.batch.requests[index].num_ids
        answer = await self._compute(num_ids, lambda: assemble_reply(flight.batch, index, missing))
        if not reply.done():
            reply.set_result(answer)

    async def _compute(self, num_ids: int, work: Callable[[], T]) -> T:
        """Run array work: at once when it is small, in a thread when it would hold up the event loop."""
        if num_ids <= self._offload_ids:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _count(self, batch: PreparedBatch, num_ids: int) -> None:
        self._metrics.batch_ids.observe(num_ids)
        for table, ids, unique in zip(self._version.tables, batch.ids_T, batch.unique_T, strict=True):
            self._metrics.ids.labels(self._version.collection, table.name).inc(ids)
            self._metrics.unique_ids.labels(self._version.collection, table.name).inc(unique)

    def _explain(self, shard: int, failure: ShardFailed) -> LookupFailed:
        text = f"shard {shard} ({self._version.models_S[shard]}) is not available: {failure}"
        kinds: dict[ErrorCode, type[LookupFailed]] = {
            ErrorCode.DEADLINE_EXCEEDED: DeadlineExceeded,
            ErrorCode.OVERLOADED: Overloaded,
            ErrorCode.INTERNAL: Internal,
        }
        return kinds.get(failure.code, Unavailable)(text)


class _Flight:
    """Which requests of a batch in flight still wait, and for which shards."""

    def __init__(self, batch: PreparedBatch, entries: Sequence[Entry[Pending, LookupReply]]) -> None:
        self.batch = batch
        self.entries = entries
        self.latest_settle = max(entry.item.settle_at for entry in entries)
        self.awaited = set[int]().union(*batch.shards_R)
        self._failed: set[int] = set()
        self._open = set(range(len(entries)))

    def wanted(self) -> set[int]:
        """Shards that a request still waits for."""
        return set[int]().union(*(self.batch.shards_R[index] & self.awaited for index in self._open))

    def complete(self) -> list[int]:
        """Requests that wait for no shard any more; each is returned once."""
        done = [index for index in sorted(self._open) if not self.batch.shards_R[index] & self.awaited]
        self._open.difference_update(done)
        return done

    def close(self, index: int) -> bool:
        """Take a request out of those that wait; false if it has been settled already."""
        if index not in self._open:
            return False
        self._open.discard(index)
        return True

    def missing_for(self, index: int) -> frozenset[int]:
        """Shards that a request needs and that have failed or not answered yet."""
        return self.batch.shards_R[index] & (self._failed | self.awaited)

    def declares_zero(self, index: int) -> bool:
        """Whether a request takes zeros for a shard that does not answer."""
        return self.batch.requests[index].request.on_shard_failure is OnShardFailure.ZERO

    def fail(self, shard: int, failure: LookupFailed) -> None:
        """Give up the requests that need ``shard`` and did not ask for zeros in its place."""
        self._failed.add(shard)
        for index in sorted(self._open):
            if shard in self.batch.shards_R[index] and not self.declares_zero(index):
                self._open.discard(index)
                self.refuse(index, failure)

    def refuse(self, index: int, failure: LookupFailed) -> None:
        """Give a request an error for an answer."""
        if not self.entries[index].reply.done():
            self.entries[index].reply.set_exception(failure)
