"""Owns reading a published version's shards back: which ids they hold, in which local rows, in which bytes.

The state is mapped, not loaded. Must not know how changes are found or written.

Shape suffixes: K ids in a table's map, N rows asked for, R local rows of the shard.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from export.contract import Kind, Manifest, Remap, Runtime, Shard, Table, shard_dir
from export.contract.layout import OVERLAY_FILE, STATE_FILE
from export.errors import ExportError
from export.mapped import MappedFile, map_safetensors
from export.row_dtypes import StoredRows


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMap:
    """The ids of one managed-collision table on one shard."""

    ids_K: torch.Tensor
    """INT64."""
    locals_K: torch.Tensor
    """INT64: local row of each."""


class StoredShard:
    """One shard of a version: the state of its base, with the overlay that a delta lays over it.

    Args:
        directory: The version's directory; its base's lies beside it.
        manifest: The version's manifest.
        index: Which shard.

    Raises:
        ExportError: A file is missing or damaged, or the version's shards hold their own state (``pytorch``).
    """

    def __init__(self, directory: Path, manifest: Manifest, index: int) -> None:
        if manifest.runtime is Runtime.PYTORCH:
            raise ExportError(
                f"{directory}: runtime 'pytorch' keeps its state inside its programs, where no delta can be laid over it; "
                "export versions with runtime 'python'"
            )
        self.shard: Shard = manifest.shards[index]
        self.tables: tuple[Table, ...] = tuple(manifest.table(entry.table) for entry in self.shard.tables)
        base = directory if manifest.kind is Kind.BASE else directory.parent / str(manifest.base)
        self._files = [MappedFile(_opened(shard_dir(base, index) / STATE_FILE))]
        names = self.shard.state
        self._base = dict(zip(names, map_safetensors(self._files[0], names), strict=True))
        self._overlay: dict[str, torch.Tensor] = {}
        if manifest.kind is Kind.DELTA:
            self._files.append(MappedFile(_opened(shard_dir(directory, index) / OVERLAY_FILE)))
            overlay = map_safetensors(self._files[1], self.shard.overlay)
            self._overlay = dict(zip(self.shard.overlay, overlay, strict=True))
        self._firsts = self._first_locals()

    @property
    def state(self) -> list[torch.Tensor]:
        """What the program takes, in its order."""
        return [self._overlay.get(name, tensor) for name, tensor in self._base.items()]

    @property
    def num_rows(self) -> int:
        """R: local rows of the base; rows of an overlay are numbered from here on."""
        return int(self._base["rows"].shape[0])

    def release(self) -> None:
        """Give the pages back."""
        for file in self._files:
            file.release()

    def map_of(self, at: int) -> StoredMap:
        """The map of the shard's table number ``at``, as it was in the base."""
        if self.tables[at].remap is Remap.MPZCH:
            first = self._firsts[at]
            identities = self._of_kind("identities", "mpzch")[first : first + self._held_rows(at), 0]
            held = (identities != -1).nonzero()[:, 0]
            return StoredMap(ids_K=identities[held], locals_K=held + first)
        offsets = self._of_kind("hash_table_offsets", "mch").tolist()
        slots = self._of_kind("hash_table", "mch")[offsets[at] : offsets[at + 1]]
        slots = slots[slots[:, 0] != -1]
        return StoredMap(ids_K=slots[:, 0].contiguous(), locals_K=slots[:, 1].contiguous())

    def served_ids(self, at: int) -> torch.Tensor:
        """Ids that the version holds in the shard's table number ``at``, its overlay laid over the base: INT64 [K]."""
        ids_K = self.map_of(at).ids_K
        if not self._overlay:
            return ids_K
        slots = self._overlay_slots(at)
        hits = self._overlay["overlay_hits"][slots[:, 1]] > 0
        return torch.cat([ids_K[~torch.isin(ids_K, slots[:, 0])], slots[hits, 0]])

    def overlaid_ids(self, at: int) -> torch.Tensor:
        """Ids that a delta moves or evicts in the shard's table number ``at``: INT64 [N]."""
        return self._overlay_slots(at)[:, 0].contiguous()

    def _overlay_slots(self, at: int) -> torch.Tensor:
        if "overlay_map" not in self._overlay:
            return torch.empty(0, 2, dtype=torch.int64)
        offsets = self._overlay["overlay_map_offsets"].tolist()
        slots = self._overlay["overlay_map"][offsets[at] : offsets[at + 1]]
        return slots[slots[:, 0] != -1]

    def row_ids(self, at: int) -> tuple[int, torch.Tensor]:
        """First local row of a managed table, and the trainer's row of each of its local rows, INT64."""
        kind = "mpzch" if self.tables[at].remap is Remap.MPZCH else "mch"
        first = self._firsts[at]
        return first, self._of_kind("row_ids", kind)[first : first + self._held_rows(at)]

    def plain_locals(self, at: int, rows_N: torch.Tensor) -> torch.Tensor:
        """First local row of each row of a plain table, INT64 [N]."""
        return rows_N * self.units(at) + self._base["row_offsets"][at]

    def units(self, at: int) -> int:
        """Local rows that each row of the table takes."""
        return self.shard.tables[at].width // self.shard.width

    def numbers(self, at: int, locals_N: torch.Tensor) -> torch.Tensor:
        """Rows of the base by their first local rows, as FP32 [N, numbers of the table on this shard]; none is int8."""
        units = torch.arange(self.units(at))
        rows = self._base["rows"].index_select(0, (locals_N[:, None] + units).reshape(-1))
        return rows.float().view(locals_N.shape[0], self.shard.tables[at].width)

    def differs(self, at: int, locals_N: torch.Tensor, rows: StoredRows) -> torch.Tensor:
        """Which of the base's rows, given by their first local rows, are not byte for byte these: BOOL [N]."""
        units = self.units(at)
        locals_NU = locals_N[:, None] + torch.arange(units)
        held = self._base["rows"].index_select(0, locals_NU.reshape(-1)).view(locals_N.shape[0], -1)
        differs_N = (_bits(held) != _bits(rows.rows_NC)).any(dim=1)
        if rows.scales_N2 is not None:
            scales_N2 = self._base["row_scales"].index_select(0, locals_N)
            differs_N |= (_bits(scales_N2) != _bits(rows.scales_N2)).any(dim=1)
        return differs_N

    def _of_kind(self, name: str, kind: str) -> torch.Tensor:
        """A remap's tensor, which has its kind in front where a shard has both kinds."""
        return self._base[name] if name in self._base else self._base[f"{kind}_{name}"]

    def _held_rows(self, at: int) -> int:
        return self.shard.tables[at].rows

    def _first_locals(self) -> dict[int, int]:
        """First local row of each managed table; see ``export.shard_state``: MPZCH tables lie in front of MCH tables."""
        firsts: dict[int, int] = {}
        local = 0
        for kind in (Remap.MPZCH, Remap.MCH):
            for at, table in enumerate(self.tables):
                if table.remap is kind:
                    firsts[at] = local
                    local += self._held_rows(at)
        return firsts


def ids_by_table(directory: Path, manifest: Manifest) -> Mapping[str, torch.Tensor]:
    """Ids that a version holds, over all shards, of each managed-collision table; raises ExportError."""
    parts: dict[str, list[torch.Tensor]] = {table.name: [] for table in manifest.tables if table.managed}
    for index in range(manifest.num_shards) if parts else ():
        stored = StoredShard(directory, manifest, index)
        for at, table in enumerate(stored.tables):
            parts[table.name].append(stored.served_ids(at).clone())
    return {name: torch.cat([*held, torch.empty(0, dtype=torch.int64)]) for name, held in parts.items()}


def _opened(path: Path) -> Path:
    if not path.is_file():
        raise ExportError(f"{path}: no such file; the version is incomplete, export a base")
    return path


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers as integers, so that NaN equals itself and 0 differs from -0."""
    sized = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[numbers.dtype.itemsize]
    return numbers.contiguous().view(sized)
