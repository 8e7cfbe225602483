"""Owns that a Triton holds just the versions it was told to, also when their processes die; must not start a server.

Facts of the bundled Triton 2.51 that shape it:

- A model process that was killed is never restarted, and its model goes on being called ready.
- Loading a loaded model does nothing, unless files of a version look changed since: then that version gets a new
  process. Another version policy starts and ends versions and leaves the processes of the others alone.
- Loads of several models run side by side when each is a call of its own, one after the other as ``--load-model``.
- Once, under heavy load, the server itself died of SIGSEGV while a dead version was loaded; it could not be made to
  again, and is restarted like any other that ends.
"""

import asyncio
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from service.triton_control import TritonCallError, load_model, read_index, unload_model
from service.triton_files import STUB
from service.triton_log import first_line
from service.triton_versions import pin_versions, read_config

log = structlog.get_logger(__name__)

STABLE_S = 60.0
"""Up for so long, a server or a model process counts as healthy again, and its back-off starts anew."""
REPAIRED_S = 2.0
"""A failure reported so soon after a load was seen before it."""
SETTLE_S = 0.2
"""Least that a call of ``repair`` takes: callers probe and call again for as long as they are not content."""
UNLOAD_TIMEOUT_S = 10.0

_POLL_S = 0.05


def backoff_s(failures: int) -> float:
    """Seconds to wait after so many failures in a row: none, then 0.5, 1, 2, … 30."""
    return min(30.0, 0.5 * 2.0 ** min(failures - 1, 10)) if failures else 0.0


def model_processes(shm_prefix: str) -> frozenset[tuple[str, int]]:
    """(model, version) of every living model process of the server whose shared memory has that prefix."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                argv = (process / "cmdline").read_text(errors="replace").split("\0")
            # Any other error must not make a living process look dead.
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if len(argv) > 2 and argv[0].endswith(STUB) and argv[2].startswith(shm_prefix):
                version = Path(argv[1]).parent
                found.add((version.parent.name, int(version.name)))
    return frozenset(found)


@dataclass(slots=True, kw_only=True)
class _Held:
    """One model: what is held of it, and its repairs, less and less often while they do not last."""

    versions: tuple[int, ...]
    config: Any
    """As it was when the versions were loaded: an export must not make a repair change what it does not repair."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    attempts: int = 0
    tried_s: float = -STABLE_S
    loaded_s: float = -STABLE_S
    repair: asyncio.Task[None] | None = None


class HeldModels:
    """The models of one Triton, and the versions that it holds of each.

    Args:
        repo: Its model repository.
        versions: Version numbers to hold, by name of the model.

    Raises:
        RepositoryError: A model has no configuration that can be read.
    """

    def __init__(self, repo: Path, versions: Mapping[str, Sequence[int]]) -> None:
        self._repo = repo
        self._held = {
            model: _Held(versions=tuple(sorted(numbers)), config=read_config(repo, model))
            for model, numbers in versions.items()
        }
        self._address = ""
        self._shm_prefix = ""

    def attach(self, address: str, shm_prefix: str) -> None:
        """Work on the server at ``address`` with that shared memory prefix; repairs of the one before are given up."""
        for held in self._held.values():
            if held.repair is not None:
                held.repair.cancel()
        self._address = address
        self._shm_prefix = shm_prefix

    async def close(self) -> None:
        """End the repairs that are under way."""
        repairs = [held.repair for held in self._held.values() if held.repair is not None]
        for repair in repairs:
            repair.cancel()
        await asyncio.gather(*repairs, return_exceptions=True)

    async def load_all(self) -> dict[str, TritonCallError]:
        """Load every model, all at once, as a server that has just started needs it.

        Returns:
            By model, why a version of it is not there.
        """
        errors: dict[str, TritonCallError] = {}

        async def load(model: str, held: _Held) -> None:
            if not held.versions:
                return
            async with held.lock:
                try:
                    await self._load(model, held.config, held.versions)
                except TritonCallError as exc:
                    errors[model] = exc
                else:
                    held.loaded_s = time.monotonic()

        await asyncio.gather(*(load(model, held) for model, held in self._held.items()))
        return errors

    async def hold(self, model: str, versions: Sequence[int]) -> None:
        """Hold other versions of a model: load those that are new, then unload those that are not asked for any more.

        A model that is not held yet is from now on; with no versions, it is not any more.

        Raises:
            RepositoryError: Its configuration cannot be read.
            TritonCallError: One of them did not load; then what was held before still is.
        """
        config = await asyncio.to_thread(read_config, self._repo, model)
        held = self._held.setdefault(model, _Held(versions=(), config=config))
        async with held.lock:
            if not versions:
                await unload_model(self._address, model)
                self._held.pop(model, None)
                return
            await self._load(model, config, versions, keep=held.versions)
            if not set(held.versions) <= set(versions):
                await self._load(model, config, versions)
            held.versions, held.config = tuple(sorted(versions)), config
            held.loaded_s = time.monotonic()

    async def repair(self, model: str) -> None:
        """Bring back a model of which Triton says that its process is not healthy; waits out the model's back-off.

        Calls for one model while it is being repaired are one repair, with one result. It returns when each held
        version is ready and has a living process, or when the server was replaced, which loads all of them. A report
        that is no later than ``REPAIRED_S`` after a load is taken for one from before it and changes nothing. So a
        caller probes again, and calls again if that fails; a call takes ``SETTLE_S`` at least if nothing was done.

        Raises:
            TritonCallError: A held version did not come back.
        """
        repair = self._begin_repair(model)
        await asyncio.wait({repair})  # leaves it running for the others when this caller is cancelled
        if not repair.cancelled():
            repair.result()

    async def repair_dead(self) -> None:
        """Begin to repair every model that lacks a process; does not wait for that, and logs a failure."""
        alive = await asyncio.to_thread(model_processes, self._shm_prefix)
        for model, held in self._held.items():
            if not {(model, version) for version in held.versions} <= alive:
                self._begin_repair(model)

    def _begin_repair(self, model: str) -> asyncio.Task[None]:
        held = self._held[model]
        if held.repair is None or held.repair.done():
            held.repair = asyncio.create_task(self._repair(model, held, time.monotonic()))
            held.repair.add_done_callback(lambda repair: _log_failure(model, repair))
        return held.repair

    async def _repair(self, model: str, held: _Held, called_s: float) -> None:
        async with held.lock:
            if held.loaded_s > called_s - REPAIRED_S and not await self._find_absent(model, held.versions):
                await asyncio.sleep(SETTLE_S)
                return
            if time.monotonic() - held.tried_s > STABLE_S:
                held.attempts = 0
            await asyncio.sleep(backoff_s(held.attempts))
            held.attempts += 1
            held.tried_s = time.monotonic()
            if not await self._reload_absent(model, held):
                await self._load_anew(model, held)
            held.loaded_s = time.monotonic()
            log.warning("triton_model_repaired", model=model, seconds=round(held.loaded_s - held.tried_s, 3))

    async def _reload_absent(self, model: str, held: _Held) -> bool:
        """Load just the versions that are not there, leaving the others alone; False if that is not the remedy."""
        absent = await self._find_absent(model, held.versions)
        for version in absent:
            try:
                os.utime(self._repo / model / str(version))
            except FileNotFoundError as exc:
                raise TritonCallError(f"{model} version {version} is gone from {self._repo}") from exc
            except OSError:  # a read-only repository cannot be made to look changed
                return False
        if not absent:  # each lives, and Triton is not content with one
            return False
        await load_model(self._address, model, pin_versions(held.config, held.versions))
        return not await self._find_absent(model, held.versions)

    async def _load_anew(self, model: str, held: _Held) -> None:
        """Unload what is not there, or everything if all of it is, and load it again."""
        anew = set(await self._find_absent(model, held.versions)) or set(held.versions)
        rest = [version for version in held.versions if version not in anew]
        if rest:
            await load_model(self._address, model, pin_versions(held.config, rest))
        else:
            await unload_model(self._address, model)
        deadline_s = time.monotonic() + UNLOAD_TIMEOUT_S
        while await self._find_ready(model) & anew and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        await self._load(model, held.config, held.versions)

    async def _load(self, model: str, config: Any, versions: Sequence[int], keep: Sequence[int] = ()) -> None:
        """Load ``versions``, unload all others but ``keep``; raises ``TritonCallError`` if one is not there then."""
        failure = None
        try:
            await load_model(self._address, model, pin_versions(config, sorted({*versions, *keep})))
        except TritonCallError as exc:
            failure = exc
        absent = await self._find_absent(model, versions)
        if absent:
            reasons = "; ".join(f"version {version}: {reason}" for version, reason in absent.items())
            raise TritonCallError(reasons) from failure

    async def _find_ready(self, model: str) -> set[int]:
        return {int(state.version) for state in await read_index(self._address) if state.model == model and state.ready}

    async def _find_absent(self, model: str, versions: Collection[int]) -> dict[int, str]:
        """Versions that are not ready or have no process, and why."""
        states = {state.version: state for state in await read_index(self._address) if state.model == model}
        alive = await asyncio.to_thread(model_processes, self._shm_prefix)
        absent = {}
        for version in versions:
            state = states.get(str(version))
            if state is None:
                absent[version] = f"not loaded; is it in {self._repo / model}?"
            elif not state.ready:
                absent[version] = first_line(state.reason)
            elif (model, version) not in alive:
                absent[version] = "its process died"
        return absent


def _log_failure(model: str, repair: asyncio.Task[None]) -> None:
    if not repair.cancelled() and (error := repair.exception()) is not None:
        log.error("triton_repair_failed", model=model, error=str(error))
