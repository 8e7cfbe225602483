"""Owns which holder of a replicated table answers which of a batch's ids; pure functions, no I/O.

The choice spreads the load and never shows in an answer. It is made from the batch alone: no state, no clock.

Shape suffixes: see ``service.types``; H counts a table's holders.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from export.contract import as_unsigned, mix64

WORTH_A_CALL = 1024
"""Ids of which a shard takes as long to answer as the call itself takes, about 0.5 ms: a shard that is not asked anyway
is asked for no fewer."""


def spread_ids(
    ids_U: NDArray[np.int64], holders: Sequence[int], load_S: Sequence[int], avoid: frozenset[int]
) -> dict[int, slice]:
    """Cut a replicated table's ids into one run for each shard that is to answer some.

    Shards that have least to do get most. A shard that the batch does not ask anyway gets ``WORTH_A_CALL`` ids or more;
    when it asks none, one is asked whatever the number.

    Args:
        ids_U: Unique ids, INT64 [U].
        holders: The shards that hold the table.
        load_S: Ids that the batch sends to each shard already, [S].
        avoid: Shards not to be asked as long as another holds the table.

    Returns:
        By shard, its run of ``ids_U``; shards without any are left out.
    """
    candidates = [shard for shard in holders if shard not in avoid] or list(holders)
    asked = [shard for shard in candidates if load_S[shard]]
    idle = [shard for shard in candidates if not load_S[shard]]
    if idle:
        # By the ids, so that small batches take turns among the idle, and the same batch always takes the same.
        first = mix64(as_unsigned(int(np.add.reduce(ids_U)))) % len(idle)
        idle = [*idle[first:], *idle[:first]]
    shares = dict[int, int]()
    for opened in range(len(idle), -1 if asked else 0, -1):
        chosen = sorted(asked + idle[:opened])
        shares = level_loads({shard: load_S[shard] for shard in chosen}, ids_U.size)
        if all(shares.get(shard, 0) >= WORTH_A_CALL for shard in idle[:opened]):
            break
    return _cut(shares)


def level_loads(load: Mapping[int, int], num_ids: int) -> dict[int, int]:
    """Share ``num_ids`` out so that the heaviest load ends as low as it can: by shard, what it gets.

    As water fills a vessel: the lightest are filled up to a common level, those above it get nothing.
    """
    by_load = sorted(load, key=lambda shard: load[shard])
    total = num_ids
    filled = list[int]()
    for shard in by_load:
        if filled and total <= load[shard] * len(filled):
            break
        total += load[shard]
        filled.append(shard)
    level, over = divmod(total, len(filled))
    return {shard: level + (place < over) - load[shard] for place, shard in enumerate(filled)}


def _cut(shares: Mapping[int, int]) -> dict[int, slice]:
    stops = itertools.accumulate(shares.values())
    return {
        shard: slice(stop - share, stop) for (shard, share), stop in zip(shares.items(), stops, strict=True) if share
    }
