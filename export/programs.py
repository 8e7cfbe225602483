"""Owns the arithmetic that a shard runs, as traced modules; state comes in as an input, nothing is baked in.

A program is a remap (``export.remaps``), an overlay (``export.overlays``) and a gather of rows in their stored format. Must not read TorchRec modules or
files.

Shape suffixes: N ids of a request, T tables of the shard, R rows of the shard, W numbers in a row of the reply.
"""

import itertools
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import nn

from export.contract import RowDtype
from export.overlays import CHANGED_STATE, OVERLAY, MapOverlay, NoMapOverlay, find_changed
from export.remaps import AllUnits, BucketedMchRemap, MchRemap, MixedRemap, MpzchRemap, OneUnit, PlainRemap, WideRemap
from export.source import HashFunction


class Fp32Rows(nn.Module):
    """Rows as they are."""

    state_names = ("rows",)

    def forward(self, local_N: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
        """FP32 [N, W]."""
        return torch.index_select(state[0], 0, local_N)


class Fp16Rows(nn.Module):
    """Half precision rows, answered in single precision."""

    state_names = ("rows",)

    def forward(self, local_N: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
        """FP32 [N, W]."""
        return torch.index_select(state[0], 0, local_N).float()


class Int8Rows(nn.Module):
    """UINT8 rows with a scale and a bias each."""

    state_names = ("row_scales", "rows")

    def forward(self, local_N: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
        """FP32 [N, W]: byte · scale + bias."""
        scales_N2 = torch.index_select(state[0], 0, local_N)
        return torch.index_select(state[1], 0, local_N) * scales_N2[:, :1] + scales_N2[:, 1:]


class RemapKind(StrEnum):
    """Which remap a shard's tables need."""

    PLAIN = "plain"
    WIDE = "wide"
    MCH = "mch"
    BUCKETED_MCH = "bucketed_mch"
    MPZCH = "mpzch"
    MIXED = "mixed"
    BUCKETED_MIXED = "bucketed_mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramKind:
    """All that distinguishes one shard's program from another's."""

    remap: RemapKind
    row_dtype: RowDtype
    width: int
    """Numbers in a row of the reply; every other size is dynamic."""
    max_probes: tuple[int, ...] = (1,)
    """Of its MPZCH tables, each once."""
    opt_in: bool = False
    """Whether one of them keeps reserved slots."""


class ShardModule(nn.Module):
    """ids → rows: what ``shard.pt2`` and ``model.pt`` are made of; remap, overlay, gather."""

    ends: list[int]

    def __init__(self, kind: ProgramKind) -> None:
        super().__init__()
        plain = kind.remap in {RemapKind.PLAIN, RemapKind.WIDE}
        self.remap = _make_remap(kind)
        self.map_overlay = NoMapOverlay() if plain else MapOverlay()
        self.units = AllUnits() if kind.remap is RemapKind.WIDE else OneUnit()
        self.rows = {RowDtype.FP32: Fp32Rows, RowDtype.FP16: Fp16Rows, RowDtype.INT8: Int8Rows}[kind.row_dtype]()
        row_names: tuple[str, ...] = self.rows.state_names  # type: ignore[assignment]
        parts: tuple[tuple[str, ...], ...] = (
            self.remap.state_names,  # type: ignore[assignment]
            self.map_overlay.state_names,
            CHANGED_STATE,
            tuple(f"{OVERLAY}{name}" for name in row_names),
            row_names,
        )
        self.state_names = tuple(itertools.chain(*parts))
        self.ends = list(itertools.accumulate(len(part) for part in parts))

    def forward(
        self, ids_N: torch.Tensor, table_lengths_T: torch.Tensor, state: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Look up ids.

        Args:
            ids_N: INT64, grouped by table, after the input hash.
            table_lengths_T: INT64: ids of each table; adds up to N.
            state: The shard's tensors, in the order of ``state_names``.

        Returns:
            embeddings FP32 [N', W], row ids INT64 [N], hits BOOL [N], and which ids the overlay decided, BOOL [N]: a hit of
            the overlay, or an evicted id. N' is N where all tables are W wide.
        """
        remap_state = state[: self.ends[0]]
        base = self.remap(ids_N, table_lengths_T, remap_state)
        map_state = state[self.ends[0] : self.ends[1]]
        local_N, row_ids_N, hits_N, moved_N = self.map_overlay(ids_N, table_lengths_T, base, map_state)
        changed_N = find_changed(local_N, state[self.ends[1] : self.ends[2]])
        base_rows = state[-1].shape[0]
        local_N = torch.where(changed_N >= 0, changed_N + base_rows, local_N)
        overlaid_N = moved_N | (hits_N & (changed_N >= 0))
        local = self.units(local_N, ids_N, table_lengths_T, remap_state)
        in_base = local < base_rows
        numbers = self.rows(torch.where(in_base, local, 0), state[self.ends[3] :])
        # Few ids have rows of the overlay; a second gather of all would cost as much as the first.
        at = torch.nonzero(~in_base)[:, 0]
        newer = self.rows(torch.index_select(local, 0, at) - base_rows, state[self.ends[2] : self.ends[3]])
        return numbers.index_copy_(0, at, newer), row_ids_N, hits_N, overlaid_N


class EmbeddedShard(nn.Module):
    """A shard that holds its own state, for servers that pass requests only (Triton's ``pytorch_libtorch``)."""

    state: list[torch.Tensor]

    def __init__(self, module: nn.Module, state: list[torch.Tensor]) -> None:
        super().__init__()
        self.module = module
        self.state = state

    def forward(
        self,
        ids: torch.Tensor,
        table_lengths: torch.Tensor,
        version: torch.Tensor,  # noqa: ARG002  an input of the Triton model
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See ``ShardModule.forward``; ``version`` is part of the model's inputs and changes nothing: no overlay reaches it."""
        rows, row_ids, hits, _ = self.module(ids, table_lengths, self.state)
        return rows, row_ids, hits


def _make_remap(kind: ProgramKind) -> nn.Module:
    probing = MpzchRemap(kind.max_probes, kind.opt_in)
    remaps: dict[RemapKind, nn.Module] = {
        RemapKind.PLAIN: PlainRemap(),
        RemapKind.WIDE: WideRemap(),
        RemapKind.MCH: MchRemap(),
        RemapKind.BUCKETED_MCH: BucketedMchRemap(),
        RemapKind.MPZCH: probing,
        RemapKind.MIXED: MixedRemap(MchRemap(), probing),
        RemapKind.BUCKETED_MIXED: MixedRemap(BucketedMchRemap(), probing),
    }
    return remaps[kind.remap]


class InputHashProgram(nn.Module):
    """One ``input_hash_func`` with its size bound; works on a copy, since such functions may write to their input."""

    def __init__(self, function: HashFunction, size: int) -> None:
        super().__init__()
        self._function = function
        self._size = size

    def forward(self, ids_N: torch.Tensor) -> torch.Tensor:
        """Hash ids INT64 [N] to ids INT64 [N]."""
        return self._function(ids_N.clone(), self._size)
