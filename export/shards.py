"""Owns what of a tensor is in this process: plain, ``ShardedTensor``, ``DTensor``; nothing is copied."""

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

LocalShard = tuple[tuple[int, ...], torch.Tensor]
"""Offsets in the whole tensor, and the numbers."""


def local_shards(tensor: Any) -> list[LocalShard]:
    """This process's shards of a tensor."""
    if isinstance(tensor, ShardedTensor):
        return [(tuple(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in tensor.local_shards()]
    if isinstance(tensor, DTensor):
        local: Any = tensor.to_local()
        if hasattr(local, "local_shards"):  # torchrec.distributed.shards_wrapper.LocalShardsWrapper
            pairs = zip(local.local_offsets(), local.local_shards(), strict=True)
            return [(tuple(offsets), shard.detach()) for offsets, shard in pairs]
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return [(tuple(offsets), local.detach())]
    return [((0,) * tensor.dim(), tensor.detach())]
