"""Owns the training-bucket rule as the numbers that a shard program reads (``export.remaps.find_bucket``)."""

from collections.abc import Sequence

import torch

from export.contract import INT64_MAX, TrainingBuckets
from export.remaps import BUCKET_STATE

_INT64_MIN = -INT64_MAX - 1
ONE_BUCKET = TrainingBuckets(input_hash_size=0, row_edges=(0, 0))
"""For tables whose answer does not depend on the bucket."""


def bucket_rule(tables: Sequence[TrainingBuckets]) -> dict[str, torch.Tensor]:
    """The tensors of ``BUCKET_STATE`` for the tables of a shard, INT64 [T]."""
    rows: list[tuple[int, ...]] = []
    first = 0
    for training in tables:
        size = training.block_size
        limit = size * training.buckets
        wrap = 0 if training.floor_modulo else (1 << 64) % training.buckets
        last, top = min(limit - 1, INT64_MAX), _INT64_MIN + max(0, limit - INT64_MAX - 1)
        rows.append((max(size, 1), last, top, training.buckets, wrap, first))
        first += training.buckets
    columns = list(zip(*rows, strict=True)) or [()] * len(BUCKET_STATE)
    return {name: torch.tensor(values, dtype=torch.int64) for name, values in zip(BUCKET_STATE, columns, strict=True)}
