"""What the tests' MPZCH tables hold is what FBGEMM's kernel finds."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.modules import FALLBACKS, fill_identities, hash_zch_module


@pytest.mark.parametrize("fallback", FALLBACKS)
@pytest.mark.parametrize(("buckets", "input_hash_size"), [(1, 0), (2, 0), (4, 1000), (6, 0), (6, 1009)])
def test_the_kernel_finds_the_ids_that_were_put_into_the_table_and_no_others(fallback, buckets, input_hash_size):
    module = hash_zch_module(48, buckets=buckets, fallback=fallback, input_hash_size=input_hash_size).eval()
    top = input_hash_size or 2**63
    ids = torch.randint(0 if input_hash_size else -top, top - 1, (48,), generator=torch.Generator().manual_seed(3))
    rows = fill_identities(module, ids.tolist())
    assert 24 < len(rows) < 48
    before = module._hash_zch_identities.clone()
    for id_ in ids.tolist():
        found = module.remap({"t": JaggedTensor(values=torch.tensor([id_]), lengths=torch.tensor([1]))})["t"]
        row = found.values().tolist()
        if id_ in rows:
            assert row == [rows[id_]]
            assert module._hash_zch_identities[rows[id_]] == id_
        elif "none" in fallback:
            assert row == []
        else:
            assert module._hash_zch_identities[row[0]] != id_
    assert torch.equal(before, module._hash_zch_identities)
