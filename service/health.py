"""Owns knowing which shards answer: a probe loop for each shard, and the gate that the dataplane asks before a call.

A probe is a real lookup of no ids: this Triton goes on calling a model ready whose process has died.
"""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import structlog

from service.catalog import ServedVersion
from service.shards import ShardClient, ShardFailed, ShardRequest

log = structlog.get_logger(__name__)

Repair = Callable[[str], Awaitable[None]]
"""Brings back a Triton model whose process has died, by model name."""


class ShardHealth:
    """Whether one shard answers.

    Args:
        version: The version that the shard has to serve.
        shard: Its index.
        client: How to reach it.
        interval_s: Seconds between two probes.
        timeout_s: Deadline of a probe.
        repair: Called when the shard's server says that the model process died; None: wait for somebody else to.
    """

    def __init__(
        self,
        version: ServedVersion,
        shard: int,
        client: ShardClient,
        *,
        interval_s: float,
        timeout_s: float,
        repair: Repair | None = None,
    ) -> None:
        self.model = version.models_S[shard]
        self.reason: str | None = "not probed yet"
        """Why the shard is not ready; None when it is."""
        self._client = client
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._repair = repair
        self._wake = asyncio.Event()
        self._probe_request = ShardRequest(
            model=self.model,
            base=version.base,
            version=version.version,
            ids_N=np.empty(0, dtype=np.int64),
            table_lengths_T=np.zeros(len(version.tables_S[shard]), dtype=np.int64),
        )

    def report(self, failure: ShardFailed) -> None:
        """Tell of a failed call: a dead process closes the gate at once, anything else is for the next probe to judge."""
        if failure.process_died:
            self._set(str(failure))
        self._wake.set()

    async def probe(self) -> ShardFailed | None:
        """Ask the shard for nothing, and open or close the gate by the answer."""
        try:
            await self._client.lookup(self._probe_request, timeout_s=self._timeout_s)
        except ShardFailed as exc:
            self._set(str(exc))
            return exc
        self._set(None)
        return None

    async def run(self) -> None:
        """Probe for ever; repair what can be repaired."""
        while True:
            failure = await self.probe()
            if failure is not None and failure.process_died and self._repair is not None:
                log.warning("shard_repair_started", model=self.model)
                try:
                    await self._repair(self.model)
                except Exception as exc:  # noqa: BLE001 - the loop must outlive any failure of a repair
                    log.error("shard_repair_failed", model=self.model, error=str(exc))  # noqa: TRY400
                else:
                    continue
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), self._interval_s)
            except TimeoutError:
                continue
            await asyncio.sleep(min(self._interval_s, 0.05))  # many failed calls at once are one reason to probe

    def _set(self, reason: str | None) -> None:
        if (reason is None) != (self.reason is None):
            log.warning("shard_ready_changed", model=self.model, ready=reason is None, reason=reason)
        self.reason = reason
