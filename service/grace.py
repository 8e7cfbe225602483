"""Owns the time that stopping may take; must not know what stops."""

import asyncio


class Grace:
    """The time that stopping may wait for calls under way, shared by everything that waits; it runs from the first look."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._ends_at: float | None = None

    def left_s(self) -> float:
        """What is left of it, seconds; 0 when it is over."""
        now = asyncio.get_running_loop().time()
        if self._ends_at is None:
            self._ends_at = now + self._grace_s
        return max(self._ends_at - now, 0.0)
