"""Owns which requests share a batch; must not know what a batch is made of.

Natural batching: a request that finds a free slot goes at once; requests that arrive while all slots are taken share
the next batch. A slot is given back when its batch is done or after ``slot_s``, whichever comes first, so that a batch
that waits for a slow shard never holds up requests that do not need it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Generic[Item, Reply]):
    """One request waiting for its reply."""

    item: Item
    weight: int
    reply: "asyncio.Future[Reply]"


class Batcher(Generic[Item, Reply]):
    """Collects submitted items into batches and runs them.

    Args:
        run: Runs one batch; sets each entry's reply (a result or an exception). It is cancelled when nobody waits for
            any of its entries any more.
        max_weight: Most weight in one batch; an item of its own over this is a batch of its own.
        slots: Batches under way before new items wait.
        slot_s: How long a batch counts as under way, seconds.
        wait_s: How long a free slot waits for company, seconds.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Entry[Item, Reply]]], Awaitable[None]],
        *,
        max_weight: int,
        slots: int = 2,
        slot_s: float = 0.01,
        wait_s: float = 0.0,
    ) -> None:
        self._run = run
        self._max_weight = max_weight
        self._free = slots
        self._slot_s = slot_s
        self._wait_s = wait_s
        self._queue: deque[Entry[Item, Reply]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduled = False
        self._closed = False

    async def submit(self, item: Item, *, weight: int) -> Reply:
        """Queue one item and wait for its reply; cancelling the wait drops the item.

        Raises:
            CancelledError: The batcher is closed.
        """
        if self._closed:
            raise asyncio.CancelledError("the batcher is closed")
        loop = asyncio.get_running_loop()
        entry: Entry[Item, Reply] = Entry(item, weight, loop.create_future())
        self._queue.append(entry)
        self._schedule()
        try:
            return await entry.reply
        finally:
            del entry  # a failure's traceback has this frame, and the entry has the failure: a cycle

    async def close(self) -> None:
        """Cancel what waits and what is under way, and wait for it to end."""
        self._closed = True
        for entry in self._queue:
            entry.reply.cancel()
        self._queue.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _schedule(self) -> None:
        if self._scheduled or not self._free or not self._queue:
            return
        self._scheduled = True
        asyncio.get_running_loop().call_later(self._wait_s, self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        while self._free and (entries := self._take()):
            self._free -= 1
            task = asyncio.create_task(self._guard(entries))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._hold_slot(task)
            self._cancel_when_unwanted(task, entries)

    def _take(self) -> list[Entry[Item, Reply]]:
        entries: list[Entry[Item, Reply]] = []
        weight = 0
        while self._queue:
            if self._queue[0].reply.done():  # its caller has gone
                self._queue.popleft()
                continue
            weight += self._queue[0].weight
            if entries and weight > self._max_weight:
                break
            entries.append(self._queue.popleft())
        return entries

    async def _guard(self, entries: Sequence[Entry[Item, Reply]]) -> None:
        """Run a batch; whatever happens to it, every entry gets a reply."""
        failure: Exception = RuntimeError("the batch ended without a reply for this request")
        try:
            await self._run(entries)
        except asyncio.CancelledError as exc:
            for entry in entries:
                entry.reply.cancel()
            # A TaskGroup's frame keeps what cancelled it: with the traceback, a cycle that would keep the batch.
            exc.__traceback__ = None
            raise
        except Exception as exc:  # noqa: BLE001 - handed to every waiting caller
            failure = exc
        for entry in entries:
            if not entry.reply.done():
                entry.reply.set_exception(failure)

    def _hold_slot(self, task: asyncio.Task[None]) -> None:
        timer: asyncio.TimerHandle | None = None

        def give_back(_: object = None) -> None:
            nonlocal timer
            if timer is not None:
                timer.cancel()
                timer = None
                self._free += 1
                self._schedule()

        timer = asyncio.get_running_loop().call_later(self._slot_s, give_back)
        task.add_done_callback(give_back)

    @staticmethod
    def _cancel_when_unwanted(task: asyncio.Task[None], entries: Sequence[Entry[Item, Reply]]) -> None:
        waiting = len(entries)

        def one_gone(_: object) -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                task.cancel()

        for entry in entries:
            entry.reply.add_done_callback(one_gone)
