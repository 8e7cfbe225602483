"""Owns the arithmetic that a shard runs, as traced modules; state comes in as inputs, nothing is baked in.

Must not read TorchRec modules or files. Every size is dynamic, so one program serves any shard of its kind and
dimension: N = 0, a shard without tables and a table without rows are ordinary.

Shape suffixes: N ids of a request, T tables of the shard, S slots of the hash table, R rows of the shard,
D embedding dimension.
"""

from typing import Final

import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
import torch
from torch import nn

from export.contract import NO_ROW
from export.source import HashFunction


class MchShard(nn.Module):
    """Remap ids through a hash table, then gather rows.

    The lookup is FBGEMM's ``pruned_hashmap_lookup`` on raw 64-bit ids. One always empty table follows the shard's own,
    because that kernel divides by the number of tables.
    """

    state_names = ("hash_table", "hash_table_offsets", "row_ids", "rows", "unknown_rows")

    def forward(  # noqa: PLR0917  a traced program's inputs are positional
        self,
        ids_N: torch.Tensor,
        table_lengths_T: torch.Tensor,
        hash_table_S2: torch.Tensor,
        hash_table_offsets: torch.Tensor,
        row_ids_R: torch.Tensor,
        rows_RD: torch.Tensor,
        unknown_rows_T: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Look up ids.

        Args:
            ids_N: INT64, grouped by table, after the input hash.
            table_lengths_T: INT64: ids of each table; adds up to N.
            hash_table_S2: INT64: (id, local row) of each slot, (−1, −1) where empty.
            hash_table_offsets: INT64 [T + 2]: slots of each table, the empty one included.
            row_ids_R: INT64: the trainer's row number of each local row, −1 for a row of zeros.
            rows_RD: FP32.
            unknown_rows_T: INT64: local row of each table for an id that the map does not hold.

        Returns:
            embeddings FP32 [N, D], row ids INT64 [N], hits BOOL [N].
        """
        total = table_lengths_T.sum().reshape(1)
        offsets = torch.cat([table_lengths_T.new_zeros(1), table_lengths_T.cumsum(0), total])
        found_N = torch.ops.fbgemm.pruned_hashmap_lookup(ids_N, offsets, hash_table_S2, hash_table_offsets)
        hits_N = found_N >= 0
        default_N = torch.repeat_interleave(unknown_rows_T, table_lengths_T, output_size=ids_N.shape[0])
        local_N = torch.where(hits_N, found_N, default_N)
        return torch.index_select(rows_RD, 0, local_N), torch.index_select(row_ids_R, 0, local_N), hits_N


class PlainShard(nn.Module):
    """Check ids against each table's row range, then gather rows; the last local row is a row of zeros."""

    no_row: Final[int] = NO_ROW
    state_names = ("row_starts", "row_stops", "row_offsets", "rows")

    def forward(  # noqa: PLR0917  a traced program's inputs are positional
        self,
        ids_N: torch.Tensor,
        table_lengths_T: torch.Tensor,
        row_starts_T: torch.Tensor,
        row_stops_T: torch.Tensor,
        row_offsets_T: torch.Tensor,
        rows_RD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Look up ids.

        Args:
            ids_N: INT64 row numbers of the whole table, grouped by table.
            table_lengths_T: INT64: ids of each table; adds up to N.
            row_starts_T: INT64: first row of each table here.
            row_stops_T: INT64: one past its last row here.
            row_offsets_T: INT64: add to a row number to get the local row.
            rows_RD: FP32, R ≥ 1.

        Returns:
            embeddings FP32 [N, D], row ids INT64 [N], hits BOOL [N]; zeros, −1 and False for an id out of range.
        """
        num_ids = ids_N.shape[0]
        starts_N = torch.repeat_interleave(row_starts_T, table_lengths_T, output_size=num_ids)
        stops_N = torch.repeat_interleave(row_stops_T, table_lengths_T, output_size=num_ids)
        offsets_N = torch.repeat_interleave(row_offsets_T, table_lengths_T, output_size=num_ids)
        hits_N = (ids_N >= starts_N) & (ids_N < stops_N)
        local_N = torch.where(hits_N, ids_N + offsets_N, rows_RD.shape[0] - 1)
        return torch.index_select(rows_RD, 0, local_N), torch.where(hits_N, ids_N, self.no_row), hits_N


class InputHashProgram(nn.Module):
    """One ``input_hash_func`` with its size bound; works on a copy, since such functions may write to their input."""

    def __init__(self, function: HashFunction, size: int) -> None:
        super().__init__()
        self._function = function
        self._size = size

    def forward(self, ids_N: torch.Tensor) -> torch.Tensor:
        """Hash ids INT64 [N] to ids INT64 [N]."""
        return self._function(ids_N.clone(), self._size)
