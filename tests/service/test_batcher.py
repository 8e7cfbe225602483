"""What shares a batch, and what happens to those who share one."""

import asyncio

import pytest

from service.batcher import Batcher


class Recorder:
    """Runs batches when told to, and remembers them."""

    def __init__(self):
        self.batches, self.gate, self.cancelled = [], asyncio.Event(), 0

    async def run(self, entries):
        self.batches.append([entry.item for entry in entries])
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        for entry in entries:
            if not entry.reply.done():
                entry.reply.set_result(entry.item * 10)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_lone_request_goes_at_once():
    recorder = Recorder()
    batcher = Batcher(recorder.run, max_weight=10, slot_s=60)
    task = asyncio.create_task(batcher.submit(1, weight=1))
    await settle()
    assert recorder.batches == [[1]]
    recorder.gate.set()
    assert await task == 10


async def test_requests_share_the_next_batch_while_the_slots_are_taken():
    recorder = Recorder()
    batcher = Batcher(recorder.run, max_weight=10, slots=1, slot_s=60)
    first = asyncio.create_task(batcher.submit(1, weight=1))
    await settle()
    others = [asyncio.create_task(batcher.submit(i, weight=1)) for i in (2, 3, 4)]
    await settle()
    assert recorder.batches == [[1]]
    recorder.gate.set()
    assert await asyncio.gather(first, *others) == [10, 20, 30, 40]
    assert recorder.batches == [[1], [2, 3, 4]]


async def test_a_batch_is_never_over_its_weight_unless_it_is_one_item():
    recorder = Recorder()
    recorder.gate.set()
    batcher = Batcher(recorder.run, max_weight=10, slots=1, slot_s=60)
    await asyncio.gather(*(batcher.submit(i, weight=w) for i, w in enumerate([4, 6, 1, 50, 3])))
    assert recorder.batches == [[0, 1], [2], [3], [4]]


async def test_a_slow_batch_gives_its_slot_back_after_a_while():
    recorder = Recorder()
    batcher = Batcher(recorder.run, max_weight=10, slots=1, slot_s=0.01)
    tasks = [asyncio.create_task(batcher.submit(1, weight=1))]
    await settle()
    tasks.append(asyncio.create_task(batcher.submit(2, weight=1)))
    async with asyncio.timeout(5):
        while len(recorder.batches) < 2:
            await asyncio.sleep(0.002)
    recorder.gate.set()
    assert await asyncio.gather(*tasks) == [10, 20]


async def test_an_item_whose_caller_left_the_queue_is_dropped():
    recorder = Recorder()
    batcher = Batcher(recorder.run, max_weight=10, slots=1, slot_s=60)
    first = asyncio.create_task(batcher.submit(1, weight=1))
    await settle()
    gone, staying = (asyncio.create_task(batcher.submit(i, weight=1)) for i in (2, 3))
    await settle()
    gone.cancel()
    await settle()
    recorder.gate.set()
    assert await asyncio.gather(first, staying) == [10, 30]
    assert recorder.batches == [[1], [3]]


async def test_a_batch_nobody_waits_for_is_cancelled():
    recorder = Recorder()
    batcher = Batcher(recorder.run, max_weight=10, slot_s=60)
    tasks = [asyncio.create_task(batcher.submit(i, weight=1)) for i in (1, 2)]
    await settle()
    tasks[0].cancel()
    await settle()
    assert recorder.cancelled == 0
    tasks[1].cancel()
    await settle()
    assert recorder.cancelled == 1


async def test_whatever_a_batch_raises_reaches_every_caller_and_the_next_batch_works():
    calls = []

    async def run(entries):
        calls.append(entries)
        if len(calls) == 1:
            raise RuntimeError("broken")
        for entry in entries:
            entry.reply.set_result("fine")

    batcher = Batcher(run, max_weight=10, slots=1)
    results = await asyncio.gather(*(batcher.submit(i, weight=1) for i in (1, 2)), return_exceptions=True)
    assert [str(result) for result in results] == ["broken", "broken"]
    assert await batcher.submit(3, weight=1) == "fine"


async def test_a_run_that_forgets_an_entry_does_not_leave_its_caller_hanging():
    async def run(entries):
        entries[0].reply.set_result("fine")

    batcher = Batcher(run, max_weight=10)
    first, second = await asyncio.gather(*(batcher.submit(i, weight=1) for i in (1, 2)), return_exceptions=True)
    assert first == "fine"
    assert "without a reply" in str(second)


async def test_close_ends_what_is_under_way():
    recorder = Recorder()
    batcher = Batcher(recorder.run, max_weight=10, slot_s=60)
    task = asyncio.create_task(batcher.submit(1, weight=1))
    await settle()
    await batcher.close()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_after_close_nothing_starts_and_nobody_hangs():
    recorder = Recorder()
    batcher = Batcher(recorder.run, max_weight=10, slots=1, slot_s=60)
    tasks = [asyncio.create_task(batcher.submit(1, weight=1))]
    await settle()
    tasks.append(asyncio.create_task(batcher.submit(2, weight=1)))
    await settle()
    await batcher.close()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    with pytest.raises(asyncio.CancelledError):
        await batcher.submit(3, weight=1)
    assert recorder.batches == [[1]]


async def test_there_are_never_more_batches_under_way_than_slots():
    running, most = 0, 0

    async def run(entries):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        for entry in entries:
            entry.reply.set_result(None)

    batcher = Batcher(run, max_weight=1, slots=2, slot_s=60)
    for _ in range(3):
        await asyncio.gather(*(batcher.submit(i, weight=1) for i in range(20)))
    assert most == 2
