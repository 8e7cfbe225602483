"""Rows in fewer bytes, as a version holds and states them."""

import numpy as np
import pytest
import torch

from export import export_collection
from export.plans import Plan
from tests.export.reader import served
from tests.modules import plain_collection

ROWS = 40


def awkward_collection(dim):
    """Rows of zeros, constant ones, outliers, tiny and large spans."""
    module = plain_collection({"user": ROWS}, dim=dim)
    with torch.no_grad():
        weight = module.embeddings["user"].weight
        weight[0] = 0.0
        weight[1] = 0.7
        weight[2, 0] = 900.0
        weight[3] *= 1e-6
        weight[4, -1] = -60000.0
    return module


def answered(tmp_path, dim, row_dtype, plan=None):
    module = awkward_collection(dim)
    manifest = export_collection(module, tmp_path, name="c", plan=plan, row_dtype=row_dtype)
    rows = served(tmp_path, manifest, {"user": list(range(ROWS))})["user"]
    found = np.stack([np.frombuffer(numbers, dtype=np.float32) for numbers, _, _ in rows])
    return manifest, found, module.embeddings["user"].weight.detach().numpy()


@pytest.mark.parametrize("row_dtype", ["fp16", "int8"])
@pytest.mark.parametrize("dim", [3, 4, 6, 20, 64, 128])
def test_every_number_is_within_the_bound_that_the_manifest_states(tmp_path, dim, row_dtype):
    manifest, found, trained = answered(tmp_path, dim, row_dtype, Plan(shards=2))
    half = ROWS // 2
    for shard, rows in zip(manifest.shards, (slice(0, half), slice(half, ROWS)), strict=True):
        (entry,) = shard.tables
        error = np.abs(found[rows].astype(np.float64) - trained[rows])
        assert error.max() <= entry.max_error
        assert entry.max_error > 0
    if row_dtype == "int8":
        steps = (trained.max(1) - trained.min(1)).astype(np.float64) / 255
        assert (np.abs(found.astype(np.float64) - trained).max(1) <= steps * (1 + 1e-5) + 1e-12).all()
        assert (found[:2] == trained[:2]).all()


def test_int8_answers_do_not_depend_on_where_columns_lie(tmp_path):
    plan = Plan(shards=2, tables={"user": {"columns": [[1, 5], [0, 12], [1, 3]]}})
    whole, cut = (answered(tmp_path / name, 20, "int8", plan)[1] for name, plan in (("a", None), ("b", plan)))
    assert whole.tobytes() == cut.tobytes()


def test_fewer_bytes_make_a_smaller_artifact(tmp_path):
    sizes = {
        row_dtype: answered(tmp_path / row_dtype, 128, row_dtype)[0].shards[0].state_bytes
        for row_dtype in ("fp32", "fp16", "int8")
    }
    assert sizes["fp16"] < 0.6 * sizes["fp32"]
    assert sizes["int8"] < 0.4 * sizes["fp32"]
