"""TorchRec's own routing rule against ours."""

import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
import numpy as np
import pytest
import torch

from export.contract import as_unsigned, training_bucket


@pytest.mark.parametrize(
    ("input_hash_size", "buckets", "ranks"),
    [
        (2**63 - 1, 4, 4), (2**63 - 1, 4, 2), (2**63 - 1, 3, 3), (2**63 - 1, 6, 3), (1000, 4, 2), (1000, 7, 7), (7, 4, 2),
        (10, 8, 4), (0, 4, 2), (0, 6, 3), (0, 3, 3), (1, 2, 1),
    ],
)  # fmt: skip
def test_training_buckets_are_fbgemms(input_hash_size, buckets, ranks):
    rng = np.random.default_rng(5)
    edges = [0, 1, 2, 5, 9, 10, 11, 249, 250, 999, 1000, 1001, 2**62, 2**62 - 1, 2**63 - 1, -1, -2, -3, -(2**63)]
    ids = np.concatenate([edges, rng.integers(-(2**63), 2**63 - 1, 200), rng.integers(-9, 1100, 200)])
    size = -(-input_hash_size // buckets)
    lengths = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.ones(ids.size, dtype=torch.int64),
        torch.from_numpy(ids),
        bucketize_pos=False,
        sequence=True,
        block_sizes=torch.tensor([size]),
        total_num_blocks=torch.tensor([[buckets]]),
        my_size=ranks,
        keep_orig_idx=True,
    )[0]
    wanted = lengths.view(ranks, ids.size).argmax(0).numpy()
    found = training_bucket(ids.view(np.uint64), input_hash_size=input_hash_size, buckets=buckets)
    assert found.dtype == np.uint64
    assert (found // (buckets // ranks)).tolist() == wanted.tolist()
    one_by_one = [
        training_bucket(as_unsigned(i), input_hash_size=input_hash_size, buckets=buckets) for i in ids.tolist()
    ]
    assert found.tolist() == one_by_one
