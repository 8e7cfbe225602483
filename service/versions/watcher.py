"""Owns noticing collections: one ``Switcher`` for each that the repository holds, from when it first appears."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from export.contract import RepositoryError, collections
from service.catalog import ServedVersion
from service.versions.connector import Spawn
from service.versions.switcher import Switcher

log = structlog.get_logger(__name__)


class Watcher:
    """Sees to all collections of a repository.

    Args:
        repo: The model repository.
        make_switcher: Makes a collection's switcher.
        stack: Ends what is made.
        spawn: Runs the switchers.
        interval_s: Seconds between two looks for new collections.
    """

    def __init__(
        self,
        repo: Path,
        make_switcher: Callable[[str], Switcher],
        *,
        stack: AsyncExitStack,
        spawn: Spawn,
        interval_s: float,
    ) -> None:
        self._repo, self._make_switcher, self._stack, self._spawn = repo, make_switcher, stack, spawn
        self._interval_s = interval_s
        self._switchers: dict[str, Switcher] = {}

    async def start(self, served: Sequence[ServedVersion]) -> None:
        """Take up what is there at the start, and watch from then on.

        Raises:
            UserError: The shards' addresses do not fit a version.
        """
        for version in served:
            await self._add(version.collection).adopt(version)
        for switcher in self._switchers.values():
            self._spawn(self._stack, switcher.run())
        self._spawn(self._stack, self._run())

    def _add(self, name: str) -> Switcher:
        switcher = self._switchers[name] = self._make_switcher(name)
        self._stack.push_async_callback(switcher.close)
        return switcher

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                names = await asyncio.to_thread(lambda: list(collections(self._repo)))
            except (RepositoryError, OSError) as exc:
                log.warning("repository_unreadable", reason=str(exc))
                continue
            for name in names:
                if name not in self._switchers:
                    log.info("collection_noticed", collection=name)
                    self._spawn(self._stack, self._add(name).run())
