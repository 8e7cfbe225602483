"""Owns how an overlay is laid over a base, as a module to be traced: changes of the map, then changes of rows.

A delta holds what differs from its base. A base has an overlay as well, one that holds nothing, so that one program
serves both. Local rows from R on are rows of the overlay, R being the rows of the base.

Shape suffixes: N ids of a request, T tables of the shard, S slots of a hash table, E entries of the overlay's map.
"""

import torch
from torch import nn

from export.remaps import look_up_ids, spread

MAP_STATE = (
    "overlay_map",
    "overlay_map_offsets",
    "overlay_minus_one",
    "overlay_locals",
    "overlay_row_ids",
    "overlay_hits",
)
"""``overlay_map`` [S, 2] and its offsets [T + 2]: FBGEMM's ``pruned_hashmap`` of raw id → entry, for ids that got another
row since the base, and for those that lost theirs. Per table [T]: the entry of the id −1, which marks the hash table's empty
slots and cannot be its key; −1: none. Per entry [E]: local row, trainer's row, 1 for a row of the id's own, 0 for an evicted
id, which answers as an unknown one."""
CHANGED_STATE = ("overlay_changed", "overlay_changed_offsets")
"""``overlay_changed`` [S, 2] and its offsets [3]: local row of the base → row of the overlay that replaces it."""
OVERLAY = "overlay_"
"""What the names of an overlay's tensors start with; its rows are called as the base's, with this in front."""


class MapOverlay(nn.Module):
    """Ids whose row is another one than in the base."""

    state_names = MAP_STATE

    def forward(
        self,
        ids_N: torch.Tensor,
        table_lengths_T: torch.Tensor,
        base: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        state: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Replace (local rows, row ids, hits) of the base where the overlay has an entry; also which those are, BOOL [N]."""
        found_N = look_up_ids(ids_N, table_lengths_T, state[0], state[1])
        entry_N = torch.where(ids_N == -1, spread(state[2], table_lengths_T, ids_N), found_N)
        moved_N = entry_N >= 0
        entry_N = torch.where(moved_N, entry_N, 0)
        return (
            torch.where(moved_N, torch.index_select(state[3], 0, entry_N), base[0]),
            torch.where(moved_N, torch.index_select(state[4], 0, entry_N), base[1]),
            torch.where(moved_N, torch.index_select(state[5], 0, entry_N) > 0, base[2]),
            found_N >= 0,
        )


class NoMapOverlay(nn.Module):
    """Plain tables have no map that could change."""

    state_names: tuple[str, ...] = ()

    def forward(
        self,
        ids_N: torch.Tensor,
        table_lengths_T: torch.Tensor,  # noqa: ARG002  the same inputs as MapOverlay
        base: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        state: list[torch.Tensor],  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The base's answers, none of them replaced."""
        return base[0], base[1], base[2], torch.zeros_like(ids_N, dtype=torch.bool)


def find_changed(local_N: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
    """Row of the overlay that replaces each local row, −1 where none does; ``state`` is that of ``CHANGED_STATE``."""
    # As one table of all ids. The count is taken from a tensor: the tracer would fix the device of a new one.
    count_1 = torch.ones_like(local_N).sum().reshape(1)
    return look_up_ids(local_N, count_1, state[0], state[1])
