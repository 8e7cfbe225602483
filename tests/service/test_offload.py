"""Small work stays on the event loop, large work leaves it, a bounded number at a time."""

import asyncio
import threading

from service.offload import THRESHOLD_BYTES, Offload
from tests.service.edge_servers import until


async def test_only_large_work_leaves_the_event_loop():
    offload = Offload()
    here = threading.get_ident()
    assert await offload.run(THRESHOLD_BYTES - 1, threading.get_ident) == here
    assert await offload.run(THRESHOLD_BYTES, threading.get_ident) != here


async def test_no_more_jobs_than_allowed_run_at_a_time():
    offload = Offload(max_jobs=2)
    running = threading.Semaphore(0)
    release = threading.Event()

    def job():
        running.release()
        assert release.wait(10)

    def started():
        return running._value

    jobs = [asyncio.create_task(offload.run(THRESHOLD_BYTES, job)) for _ in range(5)]
    await until(lambda: started() == 2)
    assert not any(task.done() for task in jobs)
    release.set()
    await asyncio.gather(*jobs)
    assert started() == 5
