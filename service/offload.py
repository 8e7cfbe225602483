"""Owns which work leaves the event loop for a thread; knows nothing of what the work is.

Decoding a large body holds Python's lock for tens of milliseconds at a time. A second such job gains nothing, and makes
the event loop, and with it the liveness probe, wait its turn behind both. Work that lets go of the lock, as compression
does, may run beside it.
"""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

THRESHOLD_BYTES = 256 * 1024
"""Work on fewer bytes than this is done in place: the hop to a thread costs more."""

P = ParamSpec("P")
T = TypeVar("T")


class Offload:
    """Runs work on large buffers in threads, a bounded number at a time.

    Args:
        max_jobs: Jobs in threads at a time; 1 for work that holds Python's lock.
    """

    def __init__(self, *, max_jobs: int = 1) -> None:
        self._places = asyncio.Semaphore(max_jobs)

    async def run(self, nbytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``work``, in a thread when it handles ``THRESHOLD_BYTES`` or more.

        A caller that is cancelled stops waiting; its job runs to the end, since a thread cannot be stopped.
        """
        if nbytes < THRESHOLD_BYTES:
            return work(*args, **kwargs)
        async with self._places:
            return await asyncio.to_thread(work, *args, **kwargs)
