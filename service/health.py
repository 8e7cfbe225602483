"""Owns knowing which shards answer: a probe loop for each shard, and the gate that the dataplane asks before a call.

A probe is a real lookup of no ids: this Triton goes on calling a model ready whose process has died.
"""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import structlog

from service.catalog import ServedVersion
from service.errors import ErrorCode
from service.shards import ShardClient, ShardFailed, ShardRequest

log = structlog.get_logger(__name__)

REST_S = 0.05
"""Least time between two rounds, however many calls fail."""

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
            width=version.widths_S[shard],
            num_rows=0,
            probe=True,
        )
        self._answers = 0

    def answered(self) -> None:
        """Tell of a lookup that was answered."""
        self._answers += 1

    def report(self, failure: ShardFailed) -> None:
        """Tell of a failed call: a dead process closes the gate at once, anything else is for the next probe to judge."""
        if failure.process_died:
            self._set(failure)
        self._wake.set()

    async def probe(self) -> ShardFailed | None:
        """Ask the shard for nothing, and open or close the gate by the answer.

        A probe waits its turn behind lookups. One that is late says nothing against a shard that answered lookups
        meanwhile.
        """
        answers = self._answers
        try:
            await self._client.lookup(self._probe_request, timeout_s=self._timeout_s)
        except ShardFailed as exc:
            if exc.code is ErrorCode.DEADLINE_EXCEEDED and self._answers > answers:
                return None
            self._set(exc)
            return exc
        self._set(None)
        return None

    async def run(self) -> None:
        """Probe for ever; repair what can be repaired."""
        while True:
            try:
                failure = await self.probe()
                if failure is not None and failure.process_died and self._repair is not None:
                    await self._bring_back(self._repair)
            except Exception as exc:
                log.exception("shard_probe_broken", model=self.model)
                self._set(ShardFailed("its state is not known", details=repr(exc)))
            await self._rest()

    async def _bring_back(self, repair: Repair) -> None:
        log.warning("shard_repair_started", model=self.model)
        try:
            await repair(self.model)
        except Exception as exc:  # noqa: BLE001 - the next probe asks for another repair
            log.error("shard_repair_failed", model=self.model, error=str(exc))  # noqa: TRY400
        else:
            await self.probe()

    async def _rest(self) -> None:
        """Wait for the next round; a failed call brings it forward, but many of them are one reason to probe."""
        self._wake.clear()
        try:
            await asyncio.wait_for(self._wake.wait(), self._interval_s)
        except TimeoutError:
            return
        await asyncio.sleep(min(self._interval_s, REST_S))

    def _set(self, failure: ShardFailed | None) -> None:
        reason = None if failure is None else str(failure)
        if (reason is None) != (self.reason is None):
            if failure is None:
                log.info("shard_ready", model=self.model)
            else:
                log.warning("shard_not_ready", model=self.model, reason=reason, details=failure.details)
        self.reason = reason
