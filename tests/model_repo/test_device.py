"""Exported shards on a GPU: every kind of program and row format answers as it does on the CPU."""

import itertools

import pytest
import torch

from export import export_collection
from export.contract import shard_dir, version_dir
from export.plans import make_plan
from model_repo.shard import load_shard
from tests.modules import hash_zch_collection, managed_collection, plain_collection

pytestmark = pytest.mark.gpu

COLLECTIONS = {
    "plain": (plain_collection, {}),
    "columns": (plain_collection, {"user": {"columns": [[1, 1], [0, 3]]}, "item": {"shard": 1}, "one": {"shard": 0}}),
    "mch": (managed_collection, {}),
    "mpzch": (lambda: hash_zch_collection(buckets=2), {}),
    "reserved": (lambda: hash_zch_collection(buckets=2, fallback="reserved"), {}),
}
IDS = [0, 1, 2, 9, 22, -1, -7, 2**62, -(2**63), 2**63 - 1]


@pytest.mark.parametrize("row_dtype", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(("make", "tables"), COLLECTIONS.values(), ids=COLLECTIONS)
def test_a_shard_on_a_gpu_answers_as_on_the_cpu(tmp_path, make, tables, row_dtype):
    module, plan = make(), make_plan({"shards": 2, "tables": tables})
    shards = {}
    for device in ("cpu", "cuda:0"):
        repo = tmp_path / device
        manifest = export_collection(module, repo, name="c", plan=plan, device=device, row_dtype=row_dtype)
        place = version_dir(repo, "c", 1)
        shards[device] = [load_shard(shard_dir(place, shard.index), shard.model) for shard in manifest.shards]
    for on_cpu, on_gpu in zip(*shards.values(), strict=True):
        on_gpu.warm_up()
        state = dict(zip(on_cpu.shard.state, on_cpu.base.state, strict=True))
        maps = [tensor[:, 0].tolist() for name, tensor in state.items() if name in {"hash_table", "identities"}]
        ids = [*IDS, *itertools.chain.from_iterable(maps)]
        num_tables = len(on_cpu.tables)
        lengths = torch.full((num_tables,), len(ids))
        expected, answer = (
            shard.lookup(shard.base, torch.tensor(ids * num_tables), lengths) for shard in (on_cpu, on_gpu)
        )
        assert torch.equal(answer.embeddings_ND, expected.embeddings_ND)
        assert torch.equal(answer.row_ids_N, expected.row_ids_N)
        assert torch.equal(answer.hits_N, expected.hits_N)
