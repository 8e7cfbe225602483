"""Owns working together: several exporter processes that each write a share of one version; must not know an export.

Small objects travel, tensors never do. Whatever fails on one rank fails on all of them, with that rank's name.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from export.errors import ExportError

T = TypeVar("T")


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
    """The ranks of a process group, each of which calls the same functions in the same order.

    Args:
        group: Any backend; a gloo group is made beside one that cannot carry objects of the CPU. None: the default one.
    """

    def __init__(self, group: Any = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ExportError("no process group: call torch.distributed.init_process_group on every rank first")
        if "gloo" not in str(dist.get_backend(group)):
            members = None if group is None else dist.get_process_group_ranks(group)
            group = dist.new_group(members, backend="gloo")
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

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
        mine: tuple[Any, str | None] = (None, None)
        failure: Exception | None = None
        try:
            mine = (None if work is None else work(), None)
        except Exception as exc:  # noqa: BLE001  the others have to hear of it, whatever it is
            failure, mine = exc, (None, str(exc) or type(exc).__name__)
        outcomes: list[tuple[Any, str | None]] = [(None, None)] * self.size
        try:
            dist.all_gather_object(outcomes, mine, group=self._group)
        except Exception as exc:
            if failure is not None:
                raise failure from exc
            raise ExportError(f"another rank ended before the export was done ({exc}); run it again") from exc
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
        yield Ranks()
    finally:
        dist.destroy_process_group()
