"""Owns working together: several exporter processes that each write a share of one version; must not know an export.

Small objects travel, tensors never do. Whatever fails on one rank fails on all of them, with that rank's name.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, Self, TypeVar

import torch.distributed as dist

from export.errors import ExportError

TEAM_TIMEOUT = timedelta(hours=4)
"""How long a rank waits for the others: longer than the slowest of them writes or checks its shards."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Team(Protocol):
    """The processes of one export."""

    rank: int
    size: int

    def on_first(self, work: Callable[[], T]) -> T:
        """Do something on rank 0 and give its result to all.

        Raises:
            ExportError: It failed there; on every rank.
        """
        ...

    def each(self, work: Callable[[], T]) -> T:
        """Do something on every rank and keep the result; it does not travel.

        Raises:
            ExportError: It failed somewhere; on every rank.
        """
        ...

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do something on every rank and give all results to all, by rank.

        Raises:
            ExportError: It failed somewhere; on every rank.
        """
        ...


class Alone:
    """A team of one: whatever fails is raised as it is."""

    rank = 0
    size = 1

    def on_first(self, work: Callable[[], T]) -> T:
        """See ``Team``."""
        return work()

    def each(self, work: Callable[[], T]) -> T:
        """See ``Team``."""
        return work()

    def together(self, work: Callable[[], T]) -> list[T]:
        """See ``Team``."""
        return [work()]


class Ranks:
    """All ranks of the default process group, each of which calls the same functions in the same order.

    Holds a gloo group of its own, with ``TEAM_TIMEOUT``, whatever the trainer's group is; leaving the ``with`` statement
    destroys it.
    """

    def __init__(self) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ExportError("no process group: call torch.distributed.init_process_group on every rank first")
        try:
            self._group = dist.new_group(backend="gloo", timeout=TEAM_TIMEOUT)
        except Exception as exc:
            raise _lost(exc) from exc
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _destroy(self._group)
        del self._group  # its threads and sockets go with the last reference

    def on_first(self, work: Callable[[], T]) -> T:
        """See ``Team``."""
        outcomes = self._share(work if self.rank == 0 else None)
        return outcomes[0]  # type: ignore[no-any-return]

    def each(self, work: Callable[[], T]) -> T:
        """See ``Team``."""
        kept: list[T] = []
        self._share(lambda: kept.append(work()))
        return kept[0]

    def together(self, work: Callable[[], T]) -> list[T]:
        """See ``Team``."""
        return self._share(work)

    def _share(self, work: Callable[[], Any] | None) -> list[Any]:
        group = self._group
        mine: tuple[Any, str | None] = (None, None)
        failure: Exception | None = None
        try:
            mine = (None if work is None else work(), None)
        except Exception as exc:  # noqa: BLE001  the others have to hear of it, whatever it is
            failure, mine = exc, (None, str(exc) or type(exc).__name__)
        outcomes: list[tuple[Any, str | None]] = [(None, None)] * self.size
        try:
            dist.all_gather_object(outcomes, mine, group=group)
        except Exception as exc:
            if failure is not None:
                raise failure from exc
            raise _lost(exc) from exc
        if failure is not None:
            raise failure
        for rank, (_, message) in enumerate(outcomes):
            if message is not None:
                raise ExportError(f"rank {rank}: {message}")
        return [result for result, _ in outcomes]


@contextmanager
def join_team() -> Iterator[Team]:
    """The ranks that torchrun started, over gloo; this process alone where it did not."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Alone()
        return
    dist.init_process_group("gloo")
    try:
        with Ranks() as team:
            yield team
    finally:
        _destroy(None)


def _lost(exc: Exception) -> ExportError:
    hours = TEAM_TIMEOUT.total_seconds() / 3600
    return ExportError(
        f"another rank ended before the export was done, or was more than {hours:g} hours late "
        f"({' '.join(str(exc).split())}); run it again"
    )


def _destroy(group: Any) -> None:
    """Not being able to must not hide why the export failed, nor fail one that is done."""
    try:
        dist.destroy_process_group(group)
    except Exception as exc:  # noqa: BLE001  whatever it is
        _log.warning("the export's process group could not be destroyed: %s", exc)
