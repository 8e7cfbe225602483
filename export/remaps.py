"""Owns how a shard turns ids into local rows, as modules to be traced; must not know how rows are stored.

Each takes (ids INT64 [N], table_lengths INT64 [T], its state) and gives (local rows INT64 [N], row ids INT64 [N], hits
BOOL [N]). Every size is dynamic: N = 0, a shard without tables and a table without rows are ordinary. Local row 0 is a row of
zeros wherever an id can be without a row.

Shape suffixes: N ids of a request, T tables of the shard, S slots of the hash table, R rows of the shard, B training
buckets of all its tables, one after the other.
"""

from collections.abc import Sequence
from typing import Final

import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
import torch
from torch import nn

from export.contract import NO_ROW


def spread(values_T: torch.Tensor, table_lengths_T: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
    """Each table's value, once for each of its ids."""
    return torch.repeat_interleave(values_T, table_lengths_T, output_size=ids_N.shape[0])


def is_in_range(ids_N: torch.Tensor, table_lengths_T: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
    """Whether each id lies between its table's ``row_starts`` and ``row_stops``, the first two of ``state``."""
    starts_N = spread(state[0], table_lengths_T, ids_N)
    stops_N = spread(state[1], table_lengths_T, ids_N)
    return (ids_N >= starts_N) & (ids_N < stops_N)


class PlainRemap(nn.Module):
    """Hold ids against each table's row range; an id is its row."""

    no_row: Final[int] = NO_ROW
    state_names = ("row_starts", "row_stops", "row_offsets")

    def forward(
        self, ids_N: torch.Tensor, table_lengths_T: torch.Tensor, state: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Remap; ``row_offsets`` is what to add to a row number to get the local row."""
        hits_N = is_in_range(ids_N, table_lengths_T, state)
        offsets_N = spread(state[2], table_lengths_T, ids_N)
        return torch.where(hits_N, ids_N + offsets_N, 0), torch.where(hits_N, ids_N, self.no_row), hits_N


class WideRemap(nn.Module):
    """``PlainRemap`` for tables of different widths: a row of a table is ``units`` local rows, and this finds the first."""

    no_row: Final[int] = NO_ROW
    state_names = ("row_starts", "row_stops", "row_offsets", "row_units")

    def forward(
        self, ids_N: torch.Tensor, table_lengths_T: torch.Tensor, state: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Remap; ``row_offsets`` is added to row number times units."""
        hits_N = is_in_range(ids_N, table_lengths_T, state)
        offsets_N = spread(state[2], table_lengths_T, ids_N)
        units_N = spread(state[3], table_lengths_T, ids_N)
        return torch.where(hits_N, ids_N * units_N + offsets_N, 0), torch.where(hits_N, ids_N, self.no_row), hits_N


class OneUnit(nn.Module):
    """All tables are as wide as the reply: an id has one local row."""

    def forward(
        self,
        first_N: torch.Tensor,
        ids_N: torch.Tensor,  # noqa: ARG002  the same inputs as AllUnits
        table_lengths_T: torch.Tensor,  # noqa: ARG002
        state: list[torch.Tensor],  # noqa: ARG002
    ) -> torch.Tensor:
        """Local rows [N] as they are."""
        return first_N


class AllUnits(nn.Module):
    """Every local row of an id, from its first on."""

    def forward(
        self, first_N: torch.Tensor, ids_N: torch.Tensor, table_lengths_T: torch.Tensor, state: list[torch.Tensor]
    ) -> torch.Tensor:
        """Local rows [N'], N' the sum of units; ``state`` is that of ``WideRemap``."""
        units_N = spread(state[3], table_lengths_T, ids_N)
        shift_N = first_N - (units_N.cumsum(0) - units_N) - 1
        local = torch.repeat_interleave(shift_N, units_N)
        # Counted and not arange, whose device the tracer would fix.
        return local + torch.ones_like(local).cumsum(0)


class MchRemap(nn.Module):
    """Look raw ids up in FBGEMM's ``pruned_hashmap``; an id that is not there has its table's default row.

    One always empty table follows the shard's own, because that kernel divides by the number of tables.
    """

    state_names = ("hash_table", "hash_table_offsets", "row_ids", "unknown_rows")

    def forward(
        self, ids_N: torch.Tensor, table_lengths_T: torch.Tensor, state: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Remap by ``hash_table`` [S, 2] (id, local row), its offsets [T + 2], ``row_ids`` [R] and ``unknown_rows`` [T]."""
        found_N = look_up_ids(ids_N, table_lengths_T, state[0], state[1])
        hits_N = found_N >= 0
        local_N = torch.where(hits_N, found_N, spread(state[3], table_lengths_T, ids_N))
        return local_N, torch.index_select(state[2], 0, local_N), hits_N


def look_up_ids(
    ids_N: torch.Tensor, table_lengths_T: torch.Tensor, hash_table_S2: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Local row of each id, −1 where the table does not hold it."""
    total = table_lengths_T.sum().reshape(1)
    bounds = torch.cat([table_lengths_T.new_zeros(1), table_lengths_T.cumsum(0), total])
    return torch.ops.fbgemm.pruned_hashmap_lookup(ids_N, bounds, hash_table_S2, offsets)  # type: ignore[no-any-return]


BUCKET_STATE = ("bucket_sizes", "bucket_lasts", "bucket_tops", "bucket_counts", "bucket_wraps", "bucket_firsts")
"""Per table [T]: ids of a block, the last non-negative id inside the blocks, the negative id below which ids are inside
(read as unsigned they follow 2^63 − 1; INT64 min: none), buckets, 2^64 mod buckets (0 for the floor modulo), place of its
first bucket."""


def find_bucket(ids_N: torch.Tensor, table_lengths_T: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
    """Place of each id's training bucket among all the shard's, [N]: ``contract.routing.training_bucket`` in INT64."""
    sizes_N = spread(state[0], table_lengths_T, ids_N)
    lasts_N = spread(state[1], table_lengths_T, ids_N)
    tops_N = spread(state[2], table_lengths_T, ids_N)
    counts_N = spread(state[3], table_lengths_T, ids_N)
    wraps_N = spread(state[4], table_lengths_T, ids_N)
    below_N = ids_N < 0
    modulo_N = torch.remainder(torch.remainder(ids_N, counts_N) + torch.where(below_N, wraps_N, 0), counts_N)
    block_N = torch.div(ids_N, sizes_N, rounding_mode="floor")
    bucket_N = torch.where(~below_N & (ids_N <= lasts_N), block_N, modulo_N)
    return torch.where(ids_N < tops_N, counts_N - 1, bucket_N) + spread(state[5], table_lengths_T, ids_N)


class BucketedMchRemap(nn.Module):
    """``MchRemap`` where an id that is not there has the default row of its training bucket."""

    state_names = ("hash_table", "hash_table_offsets", "row_ids", "unknown_rows", *BUCKET_STATE)

    def forward(
        self, ids_N: torch.Tensor, table_lengths_T: torch.Tensor, state: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Remap; ``unknown_rows`` is [B]."""
        found_N = look_up_ids(ids_N, table_lengths_T, state[0], state[1])
        hits_N = found_N >= 0
        default_N = torch.index_select(state[3], 0, find_bucket(ids_N, table_lengths_T, state[4:10]))
        local_N = torch.where(hits_N, found_N, default_N)
        return local_N, torch.index_select(state[2], 0, local_N), hits_N


class MpzchRemap(nn.Module):
    """Probe FBGEMM's identity table in the id's bucket; slots are local rows.

    Args:
        max_probes: Each ``max_probe`` that a table of the shard has; one call of the kernel for each.
        opt_in: Whether a table of the shard keeps reserved slots: their ids miss into the reserved tail of the bucket.
    """

    max_probes: list[int]
    state_names = (
        "identities",
        "row_ids",
        "slot_counts",
        "slot_offsets",
        "miss_counts",
        "miss_offsets",
        "miss_rows",
        "probe_kinds",
        *BUCKET_STATE,
    )

    def __init__(self, max_probes: Sequence[int], opt_in: bool) -> None:
        super().__init__()
        self.max_probes = list(max_probes)
        self.opt_in = opt_in

    def forward(
        self, ids_N: torch.Tensor, table_lengths_T: torch.Tensor, state: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Remap.

        ``identities`` [R, 1] is the id in each local row, ``row_ids`` [R] the trainer's row. Per bucket [B]: slots that are
        probed and where they start, slots that a miss falls back to and where those start. ``miss_rows`` [T]: the local
        row of every miss, −1 for the fallback. ``probe_kinds`` [T]: which of ``max_probes`` is the table's.
        """
        bucket_N = find_bucket(ids_N, table_lengths_T, state[8:14])
        slot_N = self._probe(ids_N, bucket_N, state[0], state[2], state[3], self.max_probes[0])
        if len(self.max_probes) > 1:
            kind_N = spread(state[7], table_lengths_T, ids_N)
            for kind in range(1, len(self.max_probes)):
                other_N = self._probe(ids_N, bucket_N, state[0], state[2], state[3], self.max_probes[kind])
                slot_N = torch.where(kind_N == kind, other_N, slot_N)
        same_N = torch.index_select(state[0], 0, slot_N)[:, 0] == ids_N
        if self.opt_in:
            tail_N = self._probe(ids_N, bucket_N, state[0], state[4], state[5], 0)
            slot_N = torch.where(same_N, slot_N, tail_N)
        hits_N = same_N & (ids_N != -1)  # an empty slot holds −1
        miss_N = spread(state[6], table_lengths_T, ids_N)
        local_N = torch.where(hits_N | (miss_N < 0), slot_N, miss_N)
        return local_N, torch.index_select(state[1], 0, local_N), hits_N

    def _probe(  # noqa: PLR0917  a traced program's inputs are positional
        self,
        ids_N: torch.Tensor,
        bucket_N: torch.Tensor,
        identities_R1: torch.Tensor,
        counts_B: torch.Tensor,
        offsets_B: torch.Tensor,
        max_probe: int,
    ) -> torch.Tensor:
        """The slot of each id, or the one that it hashes to."""
        # On a copy: the kernel's fake gives its input back, and the tracer would take ids_N for the slots from here on.
        slots_N, _ = torch.ops.fbgemm.zero_collision_hash(
            ids_N.clone(),
            identities_R1,
            max_probe,
            circular_probe=True,
            readonly=True,
            local_sizes=torch.index_select(counts_B, 0, bucket_N),
            offsets=torch.index_select(offsets_B, 0, bucket_N),
        )
        return slots_N  # type: ignore[no-any-return]


class MixedRemap(nn.Module):
    """MCH and MPZCH tables on one shard: both lookups see all ids, each table takes its own kind's answer.

    Each kind's state has an empty entry for the tables of the other; the rows of MPZCH tables come first.
    """

    def __init__(self, mch: nn.Module, mpzch: MpzchRemap) -> None:
        super().__init__()
        self.mch = mch
        self.mpzch = mpzch
        self.num_mch: int = len(mch.state_names)  # type: ignore[arg-type]
        self.state_names = (
            "mpzch_tables",
            *(f"mch_{name}" for name in mch.state_names),  # type: ignore[union-attr]
            *(f"mpzch_{name}" for name in mpzch.state_names),
        )

    def forward(
        self, ids_N: torch.Tensor, table_lengths_T: torch.Tensor, state: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Remap; ``mpzch_tables`` [T] is 1 for MPZCH tables."""
        split = 1 + self.num_mch
        local_a, rows_a, hits_a = self.mch(ids_N, table_lengths_T, state[1:split])
        local_b, rows_b, hits_b = self.mpzch(ids_N, table_lengths_T, state[split:])
        probed_N = spread(state[0], table_lengths_T, ids_N) > 0
        return (
            torch.where(probed_N, local_b, local_a),
            torch.where(probed_N, rows_b, rows_a),
            torch.where(probed_N, hits_b, hits_a),
        )
