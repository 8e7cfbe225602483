"""One traced program serves any shard of its kind: every size, in a new process, without the exporter's packages."""

import itertools
import json
import subprocess
import sys

import pytest
import torch

from export import export_collection
from export.contract import RowDtype, shard_dir, version_dir
from export.programs import ProgramKind, RemapKind, ShardModule
from export.trace import load_exported, load_torchscript, trace_shard
from tests.export.reader import expected
from tests.modules import managed_collection, map_of, plain_collection

LOADER = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, fbgemm_gpu
from safetensors.torch import load_file
place, names, lengths, ids = sys.argv[1], *map(json.loads, sys.argv[2:])
state = load_file(place + "/state.safetensors")
inputs = torch.tensor(ids), torch.tensor(lengths), [state[name] for name in names]
answers = [load(place + file)(*inputs) for file, load in
           (("/shard.pt2", lambda path: torch.export.load(path).module()), ("/model.pt", torch.jit.load))]
assert all(torch.equal(a, b) for a, b in zip(*answers))
assert not any(name.startswith(("torchrec", "export")) for name in sys.modules)
print(json.dumps([answers[0][1].tolist(), answers[0][2].tolist()]))
"""


def test_a_new_process_needs_torch_and_fbgemm_alone(tmp_path):
    module = managed_collection()
    manifest = export_collection(module, tmp_path, name="c")
    ids = [*map_of(module, "user"), 1, *map_of(module, "item"), 2, 3]
    lengths = [len(map_of(module, "user")) + 1, len(map_of(module, "item")) + 2]
    place = shard_dir(version_dir(tmp_path, "c", 1), 0)
    arguments = [str(place), json.dumps(manifest.shards[0].state), json.dumps(lengths), json.dumps(ids)]
    answer = subprocess.run([sys.executable, "-c", LOADER, *arguments], check=False, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    row_ids, hits = json.loads(answer.stdout)
    want = expected(module, "user", ids[: lengths[0]]) + expected(module, "item", ids[lengths[0] :])
    assert list(zip(row_ids, hits, strict=True)) == [(row, hit) for _, row, hit in want]


def mch_state(num_tables, ids_each, dim):
    offsets = torch.arange(num_tables + 1) * ids_each
    capacity = max(8, 2 * ids_each)
    slots = torch.tensor([0, *[capacity] * num_tables, 8]).cumsum(0)
    table = torch.full((int(slots[-1]), 2), -1)
    ids = torch.arange(num_tables * ids_each) * 7 - 20
    torch.ops.fbgemm.pruned_hashmap_insert(
        ids, torch.arange(ids.numel()), torch.cat([offsets, offsets[-1:]]), table, slots
    )
    rows = torch.arange((ids.numel() + 1) * dim, dtype=torch.float32).view(-1, dim)
    return [table, slots, torch.arange(ids.numel() + 1) * 3, torch.full((num_tables,), ids.numel()), rows]


def plain_state(num_tables, ids_each, dim):
    starts = torch.arange(num_tables) * 10
    rows = torch.arange((num_tables * ids_each + 1) * dim, dtype=torch.float32).view(-1, dim)
    return [starts, starts + ids_each, torch.arange(num_tables) * ids_each - starts + 1, rows]


@pytest.mark.parametrize("dim", [1, 3, 64])
@pytest.mark.parametrize(("remap", "state_of"), [(RemapKind.MCH, mch_state), (RemapKind.PLAIN, plain_state)])
def test_every_size_is_dynamic(remap, state_of, dim):
    kind = ProgramKind(remap=remap, row_dtype=RowDtype.FP32, width=dim)
    traced, program = trace_shard(kind), ShardModule(kind)
    exported, script = load_exported(traced.exported), load_torchscript(traced.torchscript)
    for num_tables, ids_each, num_ids in itertools.product((0, 1, 2, 9), (0, 1, 50), (0, 1, 2, 7, 1000)):
        if num_tables == 0 and num_ids:
            continue
        state = state_of(num_tables, ids_each, dim)
        ids = torch.arange(num_ids) % 91 - 30
        lengths = torch.zeros(num_tables, dtype=torch.int64)
        if num_tables:
            lengths[0] += num_ids // 3
            lengths[-1] += num_ids - num_ids // 3
        want = program(ids, lengths, state)
        for artifact in (exported, script):
            got = artifact(ids, lengths, state)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (num_tables, ids_each, num_ids)
            assert [tuple(part.shape) for part in got] == [(num_ids, dim), (num_ids,), (num_ids,)]


def test_shards_of_one_kind_get_the_same_program(tmp_path):
    export_collection(plain_collection(), tmp_path, name="c", num_shards=3)
    directory = version_dir(tmp_path, "c", 1)
    assert len({(shard_dir(directory, shard) / "shard.pt2").read_bytes() for shard in range(3)}) == 1
