"""Owns one loaded shard: its manifest entry, mapped state and program; must not know Triton.

Shape suffixes: N ids of a request, T tables of the shard, D embedding dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch

from export.contract import Manifest, RepositoryError, Shard, Table, check_size, read_manifest, shard_dir
from export.contract.layout import PROGRAM_FILE, STATE_FILE
from model_repo.errors import BadRequest, ShardLoadError
from model_repo.state import map_state, place_state
from model_repo.toolchain import check_device, check_numpy, check_toolchain, import_fbgemm

WARM_UP_IDS = (0, 1, 64, 2048)
"""Ids of the lookups made before the first request."""

Program = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
"""(ids INT64 [N], table_lengths INT64 [T], state: list of tensors) → (embeddings FP32 [N, D], row_ids INT64 [N], hits BOOL
[N], overlaid BOOL [N])."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a shard knows about the ids of one request, in their order."""

    embeddings_ND: torch.Tensor
    """FP32, ``Shard.width`` numbers wide; an id of a wider table has several rows, one after the other."""
    row_ids_N: torch.Tensor
    """INT64, row of the whole table; ``NO_ROW`` where the answer is no row."""
    hits_N: torch.Tensor
    """BOOL, whether the id has a row of its own."""
    overlaid_N: torch.Tensor
    """BOOL, whether a delta decided: a hit of its overlay, or an evicted id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardVersion:
    """One version that a process answers from: its base, or a delta on it."""

    version: int
    shard: Shard
    """The version's own entry: how many ids its maps hold, and how many slots are open."""
    state: list[torch.Tensor]
    """What the program takes, on its device; the base's tensors are shared by all versions."""


class LoadedShard:
    """A shard of one base, ready to look up ids in it and in deltas on it.

    Args:
        manifest: The base's manifest.
        shard: The manifest's entry of this shard.
        program: The traced lookup.
        state: Its tensors, in the order of ``shard.state``.
    """

    def __init__(self, *, manifest: Manifest, shard: Shard, program: Program, state: tuple[torch.Tensor, ...]) -> None:
        self.collection = manifest.collection
        self.shard = shard
        self.device = torch.device(shard.device)
        self.tables: tuple[Table, ...] = tuple(manifest.table(entry.table) for entry in shard.tables)
        self.base = ShardVersion(version=manifest.version, shard=shard, state=place_state(state, self.device))
        self._program = program

    def lookup(self, version: ShardVersion, ids_N: torch.Tensor, table_lengths_T: torch.Tensor) -> Answer:
        """Look up ids that are grouped by table.

        Args:
            version: The base, or a delta on it.
            ids_N: INT64 [N].
            table_lengths_T: INT64 [T], ids of each table in the manifest's order.

        Raises:
            BadRequest: An input has another dtype or shape, a length is negative, or the lengths do not sum to N.
        """
        self._check(ids_N, table_lengths_T)
        with torch.inference_mode():
            answer = self._program(ids_N.to(self.device), table_lengths_T.to(self.device), version.state)
        embeddings_ND, row_ids_N, hits_N, overlaid_N = (output.cpu() for output in answer)
        return Answer(embeddings_ND=embeddings_ND, row_ids_N=row_ids_N, hits_N=hits_N, overlaid_N=overlaid_N)

    def warm_up(self) -> None:
        """Look up ``WARM_UP_IDS`` ids, spread over the tables, so that the first request finds everything in place.

        Raises:
            ShardLoadError: The program does not answer.
        """
        num_tables = len(self.tables)
        for num_ids in WARM_UP_IDS if num_tables else (0,):
            lengths = [num_ids // num_tables] * num_tables if num_tables else []
            lengths[:1] = [num_ids - sum(lengths[1:])] if lengths else []
            try:
                self.lookup(
                    self.base, torch.zeros(num_ids, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
                )
            except Exception as exc:  # whatever an operator raises; none of it is declared
                raise ShardLoadError(
                    f"{self.shard.model} version {self.base.version}: the program fails on {num_ids} ids: {exc}; export "
                    "again"
                ) from exc

    def _check(self, ids_N: torch.Tensor, table_lengths_T: torch.Tensor) -> None:
        for name, tensor in (("ids", ids_N), ("table_lengths", table_lengths_T)):
            if tensor.dtype != torch.int64 or tensor.ndim != 1:
                raise BadRequest(
                    f"{name}: {tensor.dtype} of shape {list(tensor.shape)}; it must be INT64 of one dimension"
                )
        if len(table_lengths_T) != len(self.tables):
            raise BadRequest(
                f"table_lengths: {len(table_lengths_T)} entries, this shard holds {len(self.tables)} tables: "
                f"{[table.name for table in self.tables]}"
            )
        lengths = table_lengths_T.tolist()
        if any(length < 0 for length in lengths):
            raise BadRequest(f"table_lengths: {min(lengths)} is negative")
        if sum(lengths) != len(ids_N):
            raise BadRequest(f"table_lengths: sum to {sum(lengths)}, ids has {len(ids_N)}")


def load_shard(directory: Path, model: str) -> LoadedShard:
    """Load the shard of a version directory.

    Args:
        directory: ``REPO/<collection>/<version>/shard_<i>``, or a symbolic link to it.
        model: Name of the Triton model that serves it.

    Raises:
        ShardLoadError: Something is missing, incomplete, of another version or for another toolchain.
    """
    check_numpy(np.__version__)
    directory = directory.resolve()
    manifest = _read_manifest(directory)
    shard = _own_entry(manifest, directory, model)
    fbgemm = import_fbgemm()
    check_device(shard)
    check_toolchain(manifest.toolchain, torch=torch.__version__, fbgemm_gpu=fbgemm.__version__)
    try:
        for name in (PROGRAM_FILE, STATE_FILE):
            check_size(directory.parent, manifest, f"{directory.name}/{name}")
    except RepositoryError as exc:
        raise ShardLoadError(str(exc)) from exc
    state = map_state(directory / STATE_FILE, shard.state)
    return LoadedShard(manifest=manifest, shard=shard, program=_load_program(directory, manifest), state=state)


def _read_manifest(directory: Path) -> Manifest:
    version_directory = directory.parent
    if not version_directory.name.isdecimal():
        raise ShardLoadError(
            f"{directory}: not a shard directory REPO/<collection>/<version>/shard_<i>; Triton's version directory must "
            "be the exporter's symbolic link to one (copy repositories with links kept)"
        )
    try:
        return read_manifest(
            version_directory.parent.parent, version_directory.parent.name, int(version_directory.name)
        )
    except RepositoryError as exc:
        raise ShardLoadError(str(exc)) from exc


def _own_entry(manifest: Manifest, directory: Path, model: str) -> Shard:
    for shard in manifest.shards:
        if shard.model == model:
            if shard_dir(directory.parent, shard.index) != directory:
                raise ShardLoadError(f"{directory}: model {model} is shard {shard.index} in the manifest beside it")
            return shard
    raise ShardLoadError(
        f"{directory}: no shard of its manifest is model {model!r}; it has {[shard.model for shard in manifest.shards]}"
    )


def _load_program(directory: Path, manifest: Manifest) -> Program:
    path = directory / PROGRAM_FILE
    try:
        return cast("Program", torch.export.load(path).module())
    except Exception as exc:  # torch.export raises whatever its parts do: of many types, none of them declared
        raise ShardLoadError(
            f"{path}: torch {torch.__version__} cannot load it: {exc}; it was exported with torch "
            f"{manifest.toolchain.torch} and fbgemm_gpu {manifest.toolchain.fbgemm_gpu}: install those, or export again"
        ) from exc
