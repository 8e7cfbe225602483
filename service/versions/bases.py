"""Owns loading bases into the Triton that ``kjtserve serve`` started itself; must not know which version answers."""

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from export.contract import UserError, check_digest, read_manifest, version_dir
from service.triton import TritonServer
from service.triton_control import TritonCallError

CHECK_NICENESS = 10
"""Reading a base for its checksums gives way to answering."""


class OwnBases:
    """The bases that a Triton of our own holds.

    Args:
        repo: The model repository.
        triton: The server.
        held: What it was started with: bases by model.
    """

    def __init__(self, repo: Path, triton: TritonServer, held: Mapping[str, frozenset[int]]) -> None:
        self._repo, self._triton, self._held = repo, triton, dict(held)
        self._unsure = set[str]()
        """Models whose last change was called off or failed: what Triton holds of them is not known."""
        self._lock = asyncio.Lock()

    async def hold(self, collection: str, needed: Callable[[], Mapping[str, frozenset[int]]]) -> None:
        """Hold just some bases of a collection's models; a base that is new is checked byte by byte first.

        Args:
            collection: Its name.
            needed: Bases by model, asked for when it is this call's turn; models that were held before and that it does not
                name are let go of.

        Raises:
            UserError: A base is damaged or cannot be loaded; what was held before still is.
        """
        async with self._lock:
            await self._change(collection, needed())

    async def _change(self, collection: str, needed: Mapping[str, frozenset[int]]) -> None:
        before = {model: bases for model, bases in self._held.items() if _is_of(model, collection)}
        unsure = {model for model in self._unsure if _is_of(model, collection)}
        if before == needed and not unsure:
            return
        new = {base for model, bases in needed.items() for base in bases - before.get(model, frozenset())}
        for base in sorted(new):
            # In a thread that ends with it: niceness cannot be taken back without privileges.
            executor = ThreadPoolExecutor(1, thread_name_prefix="check-base")
            try:
                check = asyncio.get_running_loop().run_in_executor(executor, _check_base, self._repo, collection, base)
                await check
            finally:
                executor.shutdown(wait=False)
        models = sorted({model for model in {**before, **needed} if before.get(model) != needed.get(model)} | unsure)
        self._unsure.update(models)
        outcomes = await asyncio.gather(
            *(
                self._hold_model(model, before.get(model, frozenset()), needed.get(model, frozenset()))
                for model in models
            ),
            return_exceptions=True,
        )
        failed = None
        for model, outcome in zip(models, outcomes, strict=True):
            if outcome is None:
                self._unsure.discard(model)
                self._held[model] = needed.get(model, frozenset())
                if not self._held[model]:
                    del self._held[model]
            elif isinstance(outcome, (TritonCallError, UserError)):
                failed = failed or UserError(f"{model}: {outcome}")
            else:
                raise outcome
        if failed is not None:
            raise failed

    async def _hold_model(self, model: str, before: frozenset[int], needed: frozenset[int]) -> None:
        """Let go of what is not needed first: one base more in memory than has to be is one too many."""
        kept = before & needed
        if kept and kept != before:
            await self._triton.hold(model, sorted(kept))
        await self._triton.hold(model, sorted(needed))


def _is_of(model: str, collection: str) -> bool:
    return model.rpartition("_shard_")[0] == collection


def _check_base(repo: Path, collection: str, base: int) -> None:
    """Read every file of a base and hold it against its manifest; raises ``RepositoryError``."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), CHECK_NICENESS)
    manifest = read_manifest(repo, collection, base)
    for file in manifest.files:
        check_digest(version_dir(repo, collection, base), manifest, file.path)
