"""Owns the start workload: how soon a shard of a large table answers, and what memory its processes then hold.

The shard is exported from a real module and runs in the real Triton. Must not draw a table or a progress bar.

Shape suffixes: N ids of a call, K ids in the map.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.process_memory import descendants, named, pss_bytes
from benchmarks.report import Measurement
from benchmarks.shapes import build_full_map, map_of
from export import export_collection
from export.contract import Manifest, shard_dir, version_dir
from export.contract.layout import STATE_FILE
from export.progress import Progress, silent
from service.shards import GrpcShardClient, ShardReply, ShardRequest
from service.triton import TritonServer

ROWS = 4_000_000
QUICK_ROWS = ROWS // 10
DIM = 128
"""4 M rows of 128 FP32 numbers are 2 GB."""
REQUEST_IDS = 65_536
ROUNDS = 3
COLLECTION = "big"

START_TARGET_S = 6.0
PSS_TARGET_RATIO = 1.05
PSS_TARGET_EXTRA_BYTES = 500_000_000

_ANSWER_TIMEOUT_S = 30.0
_READ_BYTES = 16 << 20


def pss_limit_bytes(state_bytes: int) -> int:
    """What the processes of a shard may hold together, by the bytes of its state."""
    return int(PSS_TARGET_RATIO * state_bytes) + PSS_TARGET_EXTRA_BYTES


@dataclass(kw_only=True, slots=True, frozen=True)
class StartedShard:
    """The only shard of a version, in a Triton of its own."""

    server: TritonServer
    client: GrpcShardClient
    manifest: Manifest

    async def lookup(self, ids_N: NDArray[np.int64]) -> ShardReply:
        """Ask the shard itself for the rows of ids INT64 [N]."""
        request = ShardRequest(
            model=self.manifest.shards[0].model,
            base=self.manifest.version,
            version=self.manifest.version,
            ids_N=ids_N,
            table_lengths_T=np.array([ids_N.size]),
            width=self.manifest.dim,
            num_rows=ids_N.size,
            want_row_ids=True,
            want_hits=True,
        )
        return await self.client.lookup(request, timeout_s=_ANSWER_TIMEOUT_S)

    def processes(self) -> list[int]:
        """Process ids of the server, of what guards it and of the shard's model."""
        return list(named(descendants(os.getpid()), self.server.shm_prefix))


@asynccontextmanager
async def started_shard(repo: Path, manifest: Manifest) -> AsyncIterator[StartedShard]:
    """Start a Triton on a version of one table and one shard; it has answered a lookup of no ids."""
    server = TritonServer(repo, [manifest.shards[0].model])
    client = None
    try:
        await server.start()
        client = GrpcShardClient(server.grpc_address)
        shard = StartedShard(server=server, client=client, manifest=manifest)
        await shard.lookup(np.empty(0, dtype=np.int64))
        yield shard
    finally:
        if client is not None:
            await client.close()
        await server.stop()


def run(rows: int, *, rounds: int = ROUNDS, on_progress: Progress = silent) -> list[Measurement]:
    """Export a shard of ``rows`` rows, start it ``rounds`` times, and ask it for every id.

    Args:
        rows: Of the table; 4 M need 5 GB of memory and 2.2 GB of temporary files.
        rounds: Starts that are timed.
        on_progress: Told (step, done, of how many).

    Raises:
        TritonSetupError: Triton lacks something on this machine.
        TritonStartError: Triton did not come up.
    """
    with tempfile.TemporaryDirectory(prefix="kjtserve-bench-") as folder:
        manifest, ids_K = _export(Path(folder), rows, on_progress)
        seconds, pss = asyncio.run(_measure(Path(folder), manifest, ids_K, rounds, on_progress))
    return _report(manifest, rows, seconds=seconds, pss=pss)


def _export(repo: Path, rows: int, on_progress: Progress) -> tuple[Manifest, NDArray[np.int64]]:
    """Export, and keep the ids only: the module's memory is given back."""
    on_progress("building the table", 0, 1)
    module = build_full_map(rows - 1, dim=DIM)
    on_progress("building the table", 1, 1)
    manifest = export_collection(module, repo, name=COLLECTION, num_shards=1, on_progress=on_progress)
    return manifest, map_of(module)[0].numpy().copy()


async def _measure(
    repo: Path, manifest: Manifest, ids_K: NDArray[np.int64], rounds: int, on_progress: Progress
) -> tuple[list[float], int]:
    """Seconds of each start; bytes held after the last one, once every id has been asked for."""
    state = shard_dir(version_dir(repo, COLLECTION, manifest.version), 0) / STATE_FILE
    seconds = []
    pss = 0
    for number in range(rounds):
        await asyncio.to_thread(_read_through, state)
        start_s = time.perf_counter()
        async with started_shard(repo, manifest) as shard:
            seconds.append(time.perf_counter() - start_s)
            on_progress("starting the shard", number + 1, rounds)
            if number == rounds - 1:
                for first in range(0, ids_K.size, REQUEST_IDS):
                    await shard.lookup(ids_K[first : first + REQUEST_IDS])
                    on_progress("asking for every id", min(first + REQUEST_IDS, ids_K.size), ids_K.size)
                pss = sum(map(pss_bytes, shard.processes()))
    return seconds, pss


def _read_through(path: Path) -> None:
    """Have the whole file in the page cache."""
    buffer = bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _report(manifest: Manifest, rows: int, *, seconds: list[float], pss: int) -> list[Measurement]:
    whole = rows >= ROWS
    setting = f"{rows / 1e6:g} M rows × {DIM}" + ("" if whole else f" (a table {ROWS // rows} times smaller)")
    state_bytes = manifest.shards[0].state_bytes
    return [
        Measurement(
            workload="start of a shard",
            setting=setting,
            subject="launch to first answer",
            unit="s",
            rounds=tuple(seconds),
            target=START_TARGET_S if whole else None,
        ),
        Measurement(
            workload="memory of a shard",
            setting=setting,
            subject=f"its processes, a state of {state_bytes / 1e6:.0f} MB",
            unit="MB PSS",
            rounds=(pss / 1e6,),
            target=round(pss_limit_bytes(state_bytes) / 1e6),
        ),
    ]


def describe() -> str:
    """State what these measurements hold fixed, for the foot of the table."""
    return (
        "start: from launching Triton (which is looked at every 50 ms) to the first answered lookup of no ids, state in "
        "the page cache; memory: proportional set size of tritonserver, its guard and the model process after every id "
        f"was asked for, {REQUEST_IDS:,} a call"
    )
