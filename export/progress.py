"""Owns the shape in which long steps tell how far they are; must not draw anything."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Told (step, done, of how many) from time to time."""


def silent(_step: str, _done: int, _total: int) -> None:
    """Tell nobody."""
