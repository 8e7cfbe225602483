"""Calls to shards: what is asked, how it travels, how failures are named."""

from service.shards.client import GrpcShardClient, ShardClient, ShardFailed, ShardReply, ShardRequest

__all__ = ["GrpcShardClient", "ShardClient", "ShardFailed", "ShardReply", "ShardRequest"]
