"""Owns which shard an id is asked on, by the contract's rule, for ids in bulk; must not know what a shard holds."""

import numpy as np
import torch

from export.contract import Routing, Table, hash_shard, training_bucket


def shard_of(table: Table, ids_N: torch.Tensor, num_shards: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Shard of each id by the contract's rule, INT64 [N], where one shard has it.

    An id of a plain table that no range holds goes to the first or the last one, to prove that they answer zeros.
    """
    ids = ids_N.numpy()
    if table.routing is Routing.HASH:
        return hash_shard(ids.view(np.uint64), num_shards).astype(np.int64)
    if table.routing is Routing.TABLE:
        return np.full(ids.shape, table.placements[0].shard, dtype=np.int64)
    if table.routing is Routing.TRAINING:
        rule = table.training
        assert rule is not None
        numbers = ids if rule.floor_modulo else ids.view(np.uint64)
        bucket = training_bucket(numbers, input_hash_size=rule.input_hash_size, buckets=rule.buckets)
        return np.take(np.array(table.bucket_shards, dtype=np.int64), bucket.astype(np.int64))
    stops = np.array([piece.row_stop for piece in table.placements], dtype=np.int64)
    place = np.searchsorted(stops, ids, side="right").clip(0, len(stops) - 1)
    return np.take(np.array([piece.shard for piece in table.placements], dtype=np.int64), place)
