"""Owns bringing models back whose process died, of a Triton that never does so itself; must not start or stop a server.

Facts of the bundled Triton 2.51 that shape it:

- A model process that was killed is never restarted, and its model goes on being called ready.
- Loading a loaded model does nothing, unless its files look changed since.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from service.triton_control import TritonCallError, load_model, read_index, unload_model
from service.triton_files import STUB

log = structlog.get_logger(__name__)

STABLE_S = 60.0
"""Up for so long, a server or a model process counts as healthy again, and its back-off starts anew."""
REPAIRED_S = 2.0
"""A failure reported so soon after a repair was seen before it."""
UNLOAD_TIMEOUT_S = 10.0

_POLL_S = 0.05


def backoff_s(failures: int) -> float:
    """Seconds to wait after so many failures in a row: none, then 0.5, 1, 2, … 30."""
    return min(30.0, 0.5 * 2.0 ** min(failures - 1, 10)) if failures else 0.0


def model_processes(shm_prefix: str) -> frozenset[tuple[str, str]]:
    """(model, version) of every living model process of the server whose shared memory has that prefix."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                argv = (process / "cmdline").read_text(errors="replace").split("\0")
            except OSError:  # it ended while we looked
                continue
            if len(argv) > 2 and argv[0].endswith(STUB) and argv[2].startswith(shm_prefix):
                version = Path(argv[1]).parent
                found.add((version.parent.name, version.name))
    return frozenset(found)


@dataclass(slots=True)
class _History:
    """Repairs of one model: one at a time, less and less often while they do not last."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    attempts: int = 0
    tried_s: float = -STABLE_S
    done_s: float = -STABLE_S


class ModelRepairs:
    """Repairs the models of one Triton.

    Args:
        repo: Its model repository.
        models: Names of the models that have to be there.
    """

    def __init__(self, repo: Path, models: Sequence[str]) -> None:
        self._repo = repo
        self._history = {model: _History() for model in models}
        self._address = ""
        self._shm_prefix = ""
        self._seen: frozenset[tuple[str, str]] = frozenset()

    def attach(self, address: str, shm_prefix: str) -> None:
        """Work on the server that answers at ``address`` and names its shared memory by ``shm_prefix``."""
        self._address = address
        self._shm_prefix = shm_prefix
        self._seen = frozenset()

    async def repair(self, model: str) -> None:
        """Bring back a model of which Triton says that its process is not healthy; waits out the model's back-off.

        Raises:
            TritonCallError: It did not come back.
        """
        history = self._history[model]
        async with history.lock:
            if time.monotonic() - history.done_s < REPAIRED_S:
                return
            if time.monotonic() - history.tried_s > STABLE_S:
                history.attempts = 0
            await asyncio.sleep(backoff_s(history.attempts))
            history.attempts += 1
            history.tried_s = time.monotonic()
            if not await self._reload_dead(model):
                await self._load_anew(model)
            if await self._dead_versions(model) != []:
                raise TritonCallError(f"{model} was loaded anew and is dead again")
            history.done_s = time.monotonic()
            log.warning("triton_model_repaired", model=model, seconds=round(history.done_s - history.tried_s, 3))

    async def repair_dead(self) -> None:
        """Look for models that lost a process since the last look, and repair those; a failure is logged."""
        alive = await asyncio.to_thread(model_processes, self._shm_prefix)
        lost = {model for model, _ in self._seen - alive} | (set(self._history) - {model for model, _ in alive})
        self._seen = alive
        results = await asyncio.gather(*(self._repair_if_dead(model) for model in lost), return_exceptions=True)
        for error in results:
            if isinstance(error, Exception):
                log.error("triton_repair_failed", error=str(error))

    async def _repair_if_dead(self, model: str) -> None:
        # A process may be missing for a good reason: another model's, or an old version that was unloaded.
        if model in self._history and await self._dead_versions(model) != []:
            await self.repair(model)

    async def _dead_versions(self, model: str) -> list[str] | None:
        """Versions that Triton calls ready and that have no process; None if it has no ready version at all."""
        states = [state for state in await read_index(self._address) if state.model == model and state.ready]
        alive = await asyncio.to_thread(model_processes, self._shm_prefix)
        return [state.version for state in states if (model, state.version) not in alive] if states else None

    async def _reload_dead(self, model: str) -> bool:
        """Load just the versions whose process died, leaving the others alone; False if that is not the remedy."""
        dead = await self._dead_versions(model)
        if dead == []:  # it lives, and Triton is not content with it
            return False
        for version in dead or ():
            try:
                os.utime(self._repo / model / version)
            except OSError:  # a read-only repository cannot be made to look changed
                return False
        await load_model(self._address, model)
        return await self._dead_versions(model) == []

    async def _load_anew(self, model: str) -> None:
        await unload_model(self._address, model)
        deadline_s = time.monotonic() + UNLOAD_TIMEOUT_S
        while await self._dead_versions(model) is not None and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        await load_model(self._address, model)
