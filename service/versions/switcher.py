"""Owns which version of a collection answers: the newest that passes on every shard, or the one that is pinned.

One loop for each collection, in each front tier; there is nobody above them. A version that fails leaves the one before
it answering, and is tried again, since what ails it may be put right.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from export.contract import RepositoryError, UserError, read_manifest, read_pin, version_dir, versions
from export.contract.layout import MANIFEST_FILE
from service.catalog import ServedVersion, load_version
from service.dataplane import DataPlane
from service.metrics import Metrics
from service.settings import Settings
from service.versions.connector import Connected, Connector
from service.versions.preflight import NotYet, Refused, read_probes, try_out

log = structlog.get_logger(__name__)

RETRY_S = 1.0
MAX_RETRY_S = 30.0
"""A version that failed is tried again after 1, 2, 4, … 30 s."""
IDLE_POLL_S = 0.01


class Bases(Protocol):
    """Who loads bases, where that is the front tier's own business."""

    async def hold(self, collection: str, needed: Callable[[], Mapping[str, frozenset[int]]]) -> None:
        """Hold just the bases that are needed when it comes to it, by model; raises ``UserError`` when one cannot be."""
        ...


@dataclass(slots=True)
class _Failure:
    """A version that was tried in vain."""

    attempts: int = 0
    retry_at: float = 0.0


class Switcher:
    """Sees to one collection.

    Args:
        repo: The model repository.
        name: The collection.
        plane: Who answers.
        connector: Connects versions to their shards.
        bases: Loads bases into a Triton of our own; None: whoever runs the shards' Tritons loads them.
        metrics: Where versions and switches are shown.
        settings: Times.
    """

    def __init__(
        self,
        repo: Path,
        name: str,
        *,
        plane: DataPlane,
        connector: Connector,
        bases: Bases | None,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._repo, self._name, self._plane, self._connector = repo, name, plane, connector
        self._bases, self._metrics, self._settings = bases, metrics, settings
        self._connected: dict[int, Connected] = {}
        self._noticed: dict[int, float] = {}
        self._failures: dict[int, _Failure] = {}
        self._proven = False
        self._pin: int | None = None
        self._retiring: dict[asyncio.Task[None], ServedVersion] = {}
        self._settling: asyncio.Task[None] | None = None
        self._candidate: ServedVersion | None = None

    async def adopt(self, version: ServedVersion) -> None:
        """Take a version up as it is: at the start there is none that could go on answering while it is tried out."""
        connected = self._connector.connect(version)
        await self._connector.probe(connected)
        self._connected[version.version] = connected
        self._plane.serve(connected.served)

    async def close(self) -> None:
        """End everything that belongs to a version."""
        tasks = [*self._retiring, *([] if self._settling is None else [self._settling])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connected in self._connected.values():
            await connected.close()

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            try:
                await self._look()
            except Exception:
                log.exception("version_watch_broken", collection=self._name)
            await asyncio.sleep(self._settings.watch_interval_s)

    async def _look(self) -> None:
        """See what is published, and take up the best of it."""
        current, _ = self._plane.serving(self._name)
        published = await asyncio.to_thread(versions, self._repo, self._name)
        newer = [version for version in published if current is not None and version > current]
        self._show(published, await asyncio.to_thread(_appeared_s, self._repo, self._name, newer))
        pin = await self._read_pin()
        self._settle()  # nothing, unless a switch was called off before it was done
        for version in self._candidates(published, pin, current):
            if version == current and self._proven:
                return
            attempt = asyncio.create_task(self._prove(version) if version == current else self._switch(version))
            if await self._unless_pinned_elsewhere(attempt, pin):
                return

    def _candidates(self, published: Sequence[int], pin: int | None, current: int | None) -> list[int]:
        """Versions to take up, the best one first, down to the one that answers already."""
        now = time.monotonic()
        wanted = [pin] if pin is not None else [*reversed(published)]
        if current is not None and self._proven and pin is None:
            wanted = [version for version in wanted if version >= current]
        due = [
            version for version in wanted if version not in self._failures or self._failures[version].retry_at <= now
        ]
        # One that answers already is given up only for a better one.
        return due[: due.index(current) + 1] if current in due else due

    async def _unless_pinned_elsewhere(self, attempt: "asyncio.Task[bool]", pin: int | None) -> bool:
        """The outcome of an attempt; a pin that changes meanwhile ends it, and that counts as done for now."""
        try:
            while not attempt.done():
                await asyncio.wait({attempt}, timeout=self._settings.watch_interval_s)
                if not attempt.done() and await self._read_pin() != pin:
                    log.warning("version_switch_given_up", collection=self._name, reason="the pin changed")
                    return True
            return attempt.result()
        finally:
            if not attempt.done():
                attempt.cancel()
                await asyncio.gather(attempt, return_exceptions=True)

    async def _prove(self, version: int) -> bool:
        """Try out the version that was adopted untried."""
        try:
            await self._preflight(self._connected[version])
        except NotYet:
            return True  # readiness says what is missing
        except (Refused, RepositoryError) as exc:
            self._failed(version, str(exc))
            return False
        self._proven = True
        return True

    async def _switch(self, version: int) -> bool:
        """Take a version up; False if that is not possible now."""
        try:
            return await self._take_up(version)
        finally:
            self._candidate = None
            self._settle()

    async def _take_up(self, version: int) -> bool:
        started = time.monotonic()
        noticed = self._noticed.setdefault(version, started)
        kept = self._connected.get(version)
        try:
            if kept is None:
                candidate = await asyncio.to_thread(load_version, self._repo, self._name, version)
                await self._make_room(candidate.base)
                self._candidate = candidate
                await self._hold()
                loaded = time.monotonic()
                connected = self._connector.connect(candidate)
            else:
                loaded, connected = time.monotonic(), kept
            try:
                await self._preflight(connected)
                if kept is None:
                    await self._connector.probe(connected)
            except BaseException:
                if kept is None:
                    await connected.close()
                raise
        except NotYet as exc:
            if time.monotonic() - noticed > self._settings.version_timeout_s:
                self._failed(version, f"not on every shard after {self._settings.version_timeout_s:.0f} s: {exc}")
            return False
        except (Refused, UserError) as exc:
            self._failed(version, str(exc))
            return False
        self._flip(version, connected)
        now = time.monotonic()
        published_s = _published_s(self._repo, self._name, version)
        age_s = None if published_s is None else round(max(0.0, time.time() - published_s), 4)
        if age_s is not None and kept is None:
            self._metrics.publish_to_served_seconds.labels(self._name).observe(age_s)
        log.info(
            "version_switched",
            collection=self._name,
            version=version,
            base=connected.served.version.base,
            load_s=round(loaded - started, 4),
            preflight_s=round(now - loaded, 4),
            publish_to_served_s=age_s,
        )
        return True

    async def _preflight(self, connected: Connected) -> None:
        version = connected.served.version
        manifest = await asyncio.to_thread(read_manifest, self._repo, self._name, version.version)
        probes = await asyncio.to_thread(read_probes, self._repo, manifest, version)
        replicas = await self._connector.replicas(connected)
        await try_out(probes, replicas, timeout_s=self._settings.preflight_timeout_s)

    def _flip(self, version: int, connected: Connected) -> None:
        current, _ = self._plane.serving(self._name)
        back = current is not None and version < current
        self._connected.pop(version, None)
        self._connected[version] = connected  # the last one is the one that answers
        self._plane.serve(connected.served, rolled_back=back)
        self._proven = True
        self._failures.pop(version, None)
        if version == max(self._noticed, default=version):
            self._metrics.version_lag_seconds.labels(self._name).set(0)

    async def _make_room(self, base: int) -> None:
        """Before a base is loaded: let go of versions on bases that are neither its nor the current one's."""
        current, served = self._plane.serving(self._name)
        if current is None:
            return
        kept = {base, served[current].version.base}
        for version, old in served.items():
            if old.version.base not in kept:
                self._retire(version)
        leaving = [task for task, version in self._retiring.items() if version.base not in kept]
        if leaving:
            await asyncio.wait(leaving)

    def _settle(self) -> None:
        """Keep the last versions; the bases that these need are held by and by, since a Triton that loads takes its time."""
        current, _ = self._plane.serving(self._name)
        order = [version for version in self._connected if version != current]
        while len(order) >= self._settings.keep_versions:
            self._retire(order.pop(0))
        if self._settling is None or self._settling.done():
            self._settling = asyncio.create_task(self._hold_quietly())

    async def _hold_quietly(self) -> None:
        try:
            await self._hold()
        except UserError as exc:
            log.warning("bases_not_settled", collection=self._name, reason=str(exc))

    async def _hold(self) -> None:
        """Have the bases loaded that connected versions need, and the candidate's."""
        if self._bases is not None:
            await self._bases.hold(self._name, self._needed_bases)

    def _needed_bases(self) -> dict[str, frozenset[int]]:
        needed: dict[str, set[int]] = {}
        connected = [connected.served.version for connected in self._connected.values()]
        for version in [*connected, *self._retiring.values(), *([self._candidate] if self._candidate else [])]:
            for model in version.models_S:
                needed.setdefault(model, set()).add(version.base)
        return {model: frozenset(bases) for model, bases in needed.items()}

    def _retire(self, version: int) -> None:
        """Let no new request have a version; it ends when those that have it are answered."""
        connected = self._connected.pop(version)
        served = self._plane.retire(self._name, version)

        async def end() -> None:
            while served.requests:
                await asyncio.sleep(IDLE_POLL_S)
            await connected.close()

        task = asyncio.create_task(end())
        self._retiring[task] = served.version
        task.add_done_callback(lambda task: self._retiring.pop(task, None))

    def _failed(self, version: int, reason: str) -> None:
        failure = self._failures.setdefault(version, _Failure())
        retry_s = min(RETRY_S * 2**failure.attempts, MAX_RETRY_S)
        failure.attempts += 1
        failure.retry_at = time.monotonic() + retry_s
        self._metrics.version_switches.labels(self._name, "failed").inc()
        current, _ = self._plane.serving(self._name)
        log.error(
            "version_switch_failed",
            collection=self._name,
            version=version,
            serving=current,
            reason=reason,
            retry_in_s=retry_s,
        )

    async def _read_pin(self) -> int | None:
        """The pin; one that cannot be read changes nothing."""
        try:
            self._pin = await asyncio.to_thread(read_pin, self._repo, self._name)
        except RepositoryError as exc:
            log.warning("pin_unreadable", collection=self._name, reason=str(exc))
        return self._pin

    def _show(self, published: Sequence[int], newer_since_s: float | None) -> None:
        now = time.monotonic()
        self._noticed = {version: self._noticed.get(version, now) for version in published}
        self._failures = {version: failure for version, failure in self._failures.items() if version in self._noticed}
        lag_s = 0.0 if newer_since_s is None else max(0.0, time.time() - newer_since_s)
        self._metrics.newest_version.labels(self._name).set(published[-1] if published else 0)
        self._metrics.version_lag_seconds.labels(self._name).set(lag_s)


def _appeared_s(repo: Path, name: str, versions_: Sequence[int]) -> float | None:
    """When the first of some versions appeared in this repository, seconds since the epoch; None: none of them is there."""
    found = [seconds for version in versions_ if (seconds := _published_s(repo, name, version)) is not None]
    return min(found, default=None)


def _published_s(repo: Path, name: str, version: int) -> float | None:
    """When a version appeared in this repository, seconds since the epoch; None: it is gone."""
    try:
        return (version_dir(repo, name, version) / MANIFEST_FILE).stat().st_mtime
    except OSError:
        return None
