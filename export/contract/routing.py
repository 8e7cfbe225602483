"""Owns the arithmetic that says which shard holds an id; must not import numpy or torch.

The functions use operators only, so one definition serves a Python int (the specification, and the tests') and a
``numpy.uint64`` array (the front tier and the exporter, millions of ids at once).
"""

from typing import Any, TypeVar

Unsigned = TypeVar("Unsigned")
"""An unsigned 64-bit integer: a Python int in [0, 2^64) or a ``numpy.uint64`` array."""

MASK_64 = (1 << 64) - 1


def as_unsigned(signed_id: int) -> int:
    """Read the 64 bits of a signed id as an unsigned number, as FBGEMM's routing does for negative ids."""
    return signed_id & MASK_64


def mix64(ids: Unsigned) -> Unsigned:
    """Mix the bits of unsigned 64-bit ids so that any pattern of ids spreads evenly.

    The finaliser of splitmix64 (Steele, Lea and Flood, *Fast Splittable Pseudorandom Number Generators*, OOPSLA 2014;
    constants of Stafford's variant 13). It is a bijection of 64-bit numbers.

    Args:
        ids: A Python int in [0, 2^64) or a ``numpy.uint64`` array of any shape.

    Returns:
        The mixed ids, same type and shape.
    """
    z: Any = ids
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    mixed: Unsigned = z ^ (z >> 31)
    return mixed


def hash_shard(ids: Unsigned, num_shards: int) -> Unsigned:
    """Shard of each unsigned id under ``hash`` routing: ``mix64(id) mod num_shards``."""
    mixed: Any = mix64(ids)
    shards: Unsigned = mixed % num_shards
    return shards


def training_bucket(ids: Unsigned, *, input_hash_size: int, buckets: int) -> Unsigned:
    """Training bucket of each id, as TorchRec's row-wise managed collision cuts them.

    FBGEMM's ``block_bucketize_sparse_features``: ids are read as unsigned; those below ``input_hash_size``, rounded up
    to whole blocks, lie in blocks of equal size, all others go by modulo, as every id does when it is 0.

    Args:
        ids: A Python int in [0, 2^64) or a ``numpy.uint64`` array; signed where the rule is ``floor_modulo``.
        input_hash_size: The module's ``input_hash_size``.
        buckets: How many buckets there are.
    """
    size = -(-input_hash_size // buckets)
    signed: Any = ids
    over: Any = signed % buckets
    if size == 0:
        return over  # type: ignore[no-any-return]
    limit = size * buckets
    return (signed < limit) * (signed // size) + (signed >= limit) * over  # type: ignore[no-any-return]


def even_row_ranges(rows: int, num_shards: int) -> list[tuple[int, int]]:
    """Cut ``rows`` rows into ``num_shards`` ranges [start, stop) as TorchRec's row-wise sharding does.

    Every shard gets ``ceil(rows / num_shards)`` rows until none are left, so the last ranges may be short or empty:
    10 rows over 4 shards are 3, 3, 3, 1; over 6 they are 2, 2, 2, 2, 2, 0
    (``torchrec.distributed.sharding_plan``, row-wise sharding).
    """
    block = -(-rows // num_shards)
    starts = [min(shard * block, rows) for shard in range(num_shards)]
    return [(start, min(start + block, rows)) for start in starts]
