"""Owns what a version needs to answer: clients that all versions share, and health and batcher of its own."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import structlog

from export.contract import UserError
from service.batcher import Batcher
from service.catalog import ServedVersion
from service.dataplane import Served
from service.fanout import Fanout, Shard
from service.grace import Grace
from service.health import Repair, ShardHealth
from service.metrics import Metrics
from service.settings import Settings
from service.shards import GrpcShardClient, ShardClient
from service.versions.preflight import NotYet

log = structlog.get_logger(__name__)

Spawn = Callable[[AsyncExitStack, Any], None]
"""Runs a coroutine until the stack unwinds; its failure is the server's."""

OWED_DIVISOR = 4
"""Calls that nobody waits for may hold this part of ``max_inflight_bytes``, beside it. Every shard has an equal share, so
that a hung one takes nothing from the others."""

RESOLVE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """A version with everything that it needs; closing ends what is its own."""

    served: Served
    clients: tuple[ShardClient, ...]
    """Of each shard."""
    stack: AsyncExitStack

    async def close(self) -> None:
        """End its health probes and its batcher."""
        await self.stack.aclose()


class Connector:
    """Connects versions to their shards.

    Args:
        stack: Ends the clients, when the server stops.
        addresses: gRPC addresses of the shards' Tritons, one for all or one for each shard.
        settings: Times and sizes.
        metrics: Where calls are counted.
        spawn: Runs the health probes.
        repair: Brings back a model whose process died; None: somebody else does.
        grace: What is left for calls under way when the server stops.
        num_clients: How many shards there are at the start, which share what may be owed.
    """

    def __init__(
        self,
        stack: AsyncExitStack,
        addresses: Sequence[str],
        *,
        settings: Settings,
        metrics: Metrics,
        spawn: Spawn,
        repair: Repair | None,
        grace: Grace,
        num_clients: int,
    ) -> None:
        self._grace = grace
        self._max_owed_bytes = settings.max_inflight_bytes // OWED_DIVISOR // num_clients
        self._stack, self._addresses, self._settings, self._metrics = stack, tuple(addresses), settings, metrics
        self._spawn, self._repair = spawn, repair
        self._clients: dict[tuple[str, int], GrpcShardClient] = {}
        self._replicas: dict[str, GrpcShardClient] = {}
        self._executor = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="tensor")
        stack.callback(self._executor.shutdown, wait=True, cancel_futures=True)

    def connect(self, version: ServedVersion) -> Connected:
        """What a version needs, not probed yet.

        Raises:
            UserError: There are neither one address nor one for each shard.
        """
        if len(self._addresses) not in {1, version.num_shards}:
            raise UserError(
                f"--shards: {len(self._addresses)} addresses, but {version.collection} version {version.version} has "
                f"{version.num_shards} shards; give one address for each shard in order, or one for all"
            )
        stack = AsyncExitStack()
        clients = tuple(self._client(version.collection, index) for index in range(version.num_shards))
        health = tuple(self._health(version, index, client) for index, client in enumerate(clients))
        fanout = Fanout(
            version,
            [Shard(client=client, health=own) for client, own in zip(clients, health, strict=True)],
            metrics=self._metrics,
            executor=self._executor,
            offload_ids=self._settings.offload_ids,
        )
        batcher = Batcher(
            fanout.run, max_weight=self._settings.max_batch_ids, wait_s=self._settings.max_batch_wait_us / 1e6
        )
        stack.push_async_callback(batcher.close)
        served = Served(version=version, health=health, batcher=batcher)
        return Connected(served=served, clients=clients, stack=stack)

    async def probe(self, connected: Connected) -> None:
        """Probe every shard once, and then for as long as the version is connected."""
        await asyncio.gather(*(health.probe() for health in connected.served.health))
        for health in connected.served.health:
            self._spawn(connected.stack, health.run())

    async def replicas(self, connected: Connected) -> list[list[ShardClient]]:
        """Clients of every replica of every shard: an address whose name stands for several hosts means all of them.

        They are kept: a call that is on its way must not be ended by its connection's end.

        Raises:
            NotYet: A name cannot be resolved, so that nobody knows its hosts.
        """
        found: list[list[ShardClient]] = []
        for index, client in enumerate(connected.clients):
            hosts = await _hosts(self._address(index))
            found.append([client] if len(hosts) == 1 else [self._replica(host) for host in hosts])
        return found

    def _replica(self, host: str) -> GrpcShardClient:
        if host not in self._replicas:
            self._replicas[host] = self._open(host)
        return self._replicas[host]

    def _address(self, index: int) -> str:
        return self._addresses[index % len(self._addresses)]

    def _client(self, collection: str, index: int) -> GrpcShardClient:
        key = (collection, index)
        if key not in self._clients:
            self._clients[key] = self._open(self._address(index))
        return self._clients[key]

    def _open(self, address: str) -> GrpcShardClient:
        client = GrpcShardClient(address, max_owed_bytes=self._max_owed_bytes)

        async def close() -> None:
            await client.close(grace_s=self._grace.left_s())

        self._stack.push_async_callback(close)
        return client

    def _health(self, version: ServedVersion, index: int, client: ShardClient) -> ShardHealth:
        return ShardHealth(
            version,
            index,
            client,
            interval_s=self._settings.probe_interval_s,
            timeout_s=self._settings.probe_timeout_s,
            repair=self._repair,
        )


async def _hosts(address: str) -> list[str]:
    """``HOST:PORT`` of every host that a name stands for, one or more; raises ``NotYet`` if it cannot be resolved."""
    host, _, port = address.rpartition(":")
    lookup: Awaitable[Any] = asyncio.get_running_loop().getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    )
    try:
        found = await asyncio.wait_for(lookup, RESOLVE_TIMEOUT_S)
    except (OSError, TimeoutError) as exc:
        raise NotYet(f"{host}: cannot be resolved: {exc or 'no answer'}") from exc
    hosts = sorted({info[4][0] for info in found})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
