"""Owns trying a version out: its probes, asked of every replica of every shard, must get the answers that were exported.

The probes lie beside the shards' files, see ``export.contract.layout.PROBES_FILE``. Must not decide what is served.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from export.contract import Manifest, RepositoryError, check_digest, shard_dir, version_dir
from export.contract.layout import PROBES_FILE
from service.catalog import ServedVersion
from service.errors import ErrorCode
from service.shards import ShardClient, ShardFailed, ShardRequest

RETRY_S = 0.01
"""Pause before a shard that is still mapping the version is asked again."""
_PASSING = {ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.OVERLOADED}


class NotYet(Exception):
    """A shard cannot say: it is not there, or does not have the version yet."""


class Refused(Exception):
    """A shard cannot serve the version, or answers a probe wrongly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """What one shard is asked, and what it has to answer."""

    request: ShardRequest
    embeddings_RW: NDArray[np.float32]
    row_ids_N: NDArray[np.int64]
    hits_N: NDArray[np.bool_]


def read_probes(repo: Path, manifest: Manifest, version: ServedVersion) -> tuple[Probes, ...]:
    """The probes of every shard.

    Raises:
        RepositoryError: A file is missing or damaged.
    """
    directory = version_dir(repo, manifest.collection, manifest.version)
    return tuple(_read(directory, manifest, version, shard) for shard in range(manifest.num_shards))


def _read(directory: Path, manifest: Manifest, version: ServedVersion, shard: int) -> Probes:
    path = check_digest(directory, manifest, f"{shard_dir(directory, shard).name}/{PROBES_FILE}")
    try:
        held = load(path.read_bytes())
        return Probes(
            request=ShardRequest(
                model=version.models_S[shard],
                base=version.base,
                version=version.version,
                ids_N=held["ids"],
                table_lengths_T=held["table_lengths"],
                width=version.widths_S[shard],
                num_rows=held["embeddings"].shape[0],
                want_row_ids=True,
                want_hits=True,
                probe=True,
            ),
            embeddings_RW=held["embeddings"],
            row_ids_N=held["row_ids"],
            hits_N=held["hits"],
        )
    except (KeyError, SafetensorError) as exc:
        raise RepositoryError(f"{path}: holds no probes ({exc}); export the version again") from exc


async def try_out(probes: Sequence[Probes], replicas: Sequence[Sequence[ShardClient]], *, timeout_s: float) -> None:
    """Ask every replica of every shard its probes, all at once.

    Args:
        probes: Of each shard.
        replicas: Of each shard, its clients.
        timeout_s: How long an answer may be put off.

    Raises:
        Refused: One cannot serve the version, or answered otherwise than was exported.
        NotYet: One did not answer in time.
    """
    asked = [
        asyncio.create_task(_ask(probe, client, timeout_s))
        for probe, clients in zip(probes, replicas, strict=True)
        for client in clients
    ]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    for kind in (Refused, NotYet, BaseException):
        for outcome in outcomes:
            if isinstance(outcome, kind):
                raise outcome


async def _ask(probes: Probes, client: ShardClient, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    model = probes.request.model
    while True:
        left_s = max(deadline - loop.time(), RETRY_S)
        try:
            reply = await client.lookup(probes.request, timeout_s=left_s)
            break
        except ShardFailed as exc:
            if exc.refused or exc.code not in _PASSING:
                raise Refused(f"{model}: {exc.details}") from exc
            if loop.time() + RETRY_S >= deadline:
                raise NotYet(f"{model}: {exc.details}") from exc
        await asyncio.sleep(RETRY_S)
    assert reply.row_ids_N is not None
    assert reply.hits_N is not None
    found: tuple[NDArray[Any], ...] = (reply.embeddings_RW.view(np.int32), reply.row_ids_N, reply.hits_N)
    wanted: tuple[NDArray[Any], ...] = (probes.embeddings_RW.view(np.int32), probes.row_ids_N, probes.hits_N)
    for name, got, want in zip(("rows", "row ids", "hits"), found, wanted, strict=True):
        if not np.array_equal(got, want):
            raise Refused(f"{model}: answers a probe with other {name} than were exported")
