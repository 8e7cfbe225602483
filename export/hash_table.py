"""Owns the building of FBGEMM's ``pruned_hashmap``: int64 keys to rows, several tables in one; must not know what of."""

from collections.abc import Sequence

import torch

_MIN_SLOTS = 8
_LINE_SLOTS = 4
"""Slots in a cache line."""


def build_hash_table(
    tables: Sequence[tuple[torch.Tensor, torch.Tensor]], *, slots_per_key: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """One hash table of all tables, and after them one that is always empty, since the kernel divides by their number.

    Args:
        tables: (keys INT64 [K], none of them −1; values INT64 [K]) of each.
        slots_per_key: Its size; a larger one answers for keys that are not there sooner.

    Returns:
        The slots INT64 [S, 2], −1 where empty, and each table's offset INT64 [T + 2].
    """
    sizes = [*(int(keys.shape[0]) for keys, _ in tables), 0]
    slots = [max(_MIN_SLOTS, slots_per_key * size) for size in sizes]
    # Whole cache lines: what follows in the file, the rows, and the slots themselves start on one.
    slots[-1] += -sum(slots) % _LINE_SLOTS
    hash_table = torch.full((sum(slots), 2), -1, dtype=torch.int64)
    offsets = torch.tensor([0, *slots]).cumsum(0)
    empty = torch.empty(0, dtype=torch.int64)
    torch.ops.fbgemm.pruned_hashmap_insert(
        torch.cat([keys for keys, _ in tables] + [empty]),
        torch.cat([values for _, values in tables] + [empty]),
        torch.tensor([0, *sizes]).cumsum(0),
        hash_table,
        offsets,
    )
    return hash_table, offsets
