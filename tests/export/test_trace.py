"""One traced program serves any shard of its kind: every size, in a new process, without the exporter's packages."""

import io
import itertools
import json
import subprocess
import sys

import pytest
import torch

from export import export_collection
from export.bucket_state import bucket_rule
from export.contract import INT64_MAX, RowDtype, TrainingBuckets, shard_dir, version_dir
from export.overlay_state import MapChanges, overlay_tensors
from export.programs import ProgramKind, RemapKind, ShardModule
from export.row_dtypes import DTYPES
from export.state import ready
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


KINDS = [
    ProgramKind(remap=RemapKind.PLAIN, row_dtype=RowDtype.FP16, width=1),
    ProgramKind(remap=RemapKind.WIDE, row_dtype=RowDtype.INT8, width=3),
    ProgramKind(remap=RemapKind.MCH, row_dtype=RowDtype.FP32, width=64),
    ProgramKind(remap=RemapKind.BUCKETED_MCH, row_dtype=RowDtype.INT8, width=4),
    ProgramKind(remap=RemapKind.MPZCH, row_dtype=RowDtype.FP32, width=3, max_probes=(3,)),
    ProgramKind(remap=RemapKind.MPZCH, row_dtype=RowDtype.FP16, width=20, max_probes=(2, 9), opt_in=True),
    ProgramKind(remap=RemapKind.MIXED, row_dtype=RowDtype.FP32, width=6, max_probes=(4,)),
    ProgramKind(remap=RemapKind.BUCKETED_MIXED, row_dtype=RowDtype.INT8, width=1, max_probes=(2, 9), opt_in=True),
]


def state_of(kind, num_tables, ids_each):
    """A shard of any kind: every other table of a mixed one is MPZCH, every table has rows and ids of its own."""
    tables = range(num_tables)
    bucketed = kind.remap not in {RemapKind.MCH, RemapKind.MIXED}
    rules = [
        TrainingBuckets(input_hash_size=(0, 40, INT64_MAX)[table % 3], row_edges=tuple(range(2 + table % 3)))
        for table in tables
    ]
    buckets = sum(rule.buckets for rule in rules)
    held, tail = num_tables * ids_each, 2 * num_tables + 9
    ids = torch.arange(held) * 7 - 20
    slots = torch.tensor([0, *[max(8, 2 * ids_each)] * num_tables, 8]).cumsum(0)
    hash_table = torch.full((int(slots[-1]), 2), -1)
    ends = torch.arange(num_tables + 1) * ids_each
    torch.ops.fbgemm.pruned_hashmap_insert(ids, torch.arange(held), torch.cat([ends, ends[-1:]]), hash_table, slots)
    of_bucket = torch.repeat_interleave(torch.arange(num_tables), torch.tensor([rule.buckets for rule in rules]).long())
    units = torch.arange(num_tables) % 2 * (kind.remap is RemapKind.WIDE) + 1
    starts = torch.arange(num_tables) * 10
    total = 2 * held + tail
    rows = torch.arange(total * kind.width).view(-1, kind.width) % 251
    tensors = {
        **bucket_rule(rules),
        "row_starts": starts,
        "row_stops": starts + ids_each,
        "row_offsets": 2 + 2 * ids_each * torch.arange(num_tables) - starts * units,
        "row_units": units,
        "hash_table": hash_table,
        "hash_table_offsets": slots,
        "row_ids": torch.arange(total) * 3,
        "unknown_rows": held + torch.arange(buckets if bucketed else num_tables) % tail,
        "identities": torch.cat([ids, torch.full((total - held,), -1)])[:, None],
        "slot_counts": torch.full((buckets,), max(ids_each, 1)),
        "slot_offsets": of_bucket * ids_each,
        "miss_counts": torch.full((buckets,), 2),
        "miss_offsets": held + of_bucket * 2,
        "miss_rows": torch.tensor([-1 if table % 3 else held for table in tables], dtype=torch.int64),
        "probe_kinds": torch.arange(num_tables) % len(kind.max_probes),
        "mpzch_tables": torch.arange(num_tables) % 2,
        **overlay_of(kind, num_tables, ids_each, total),
        "row_scales": torch.rand(total, 2),
        "rows": rows.to({RowDtype.FP16: torch.float16, RowDtype.INT8: torch.uint8}.get(kind.row_dtype, torch.float32)),
    }
    names = trace_shard(kind).state_names
    return [tensors[name if name in tensors else name.partition("_")[2]] for name in names]  # of a mix: mch_…, mpzch_…


def overlay_of(kind, num_tables, ids_each, base_rows):
    """Every fifth known id moved, every seventh evicted, and some rows of the base replaced."""
    held = num_tables * ids_each
    ids = [torch.arange(table * ids_each, (table + 1) * ids_each) * 7 - 20 for table in range(num_tables)]
    maps = []
    for own in ids:
        moved, gone = own[::5], own[1::7]
        both = torch.cat([moved, gone[~torch.isin(gone, moved)]])
        hits = torch.isin(both, moved).long()
        maps.append(MapChanges(ids_E=both, locals_E=both.remainder(3) + base_rows, row_ids_E=both + 1000, hits_E=hits))
    wide = kind.remap is RemapKind.WIDE
    some = torch.arange(0, held, 3)
    changed = (2 + 2 * some, torch.arange(some.shape[0])) if wide else (some, torch.arange(some.shape[0]))
    numbers = torch.arange((some.shape[0] * 2 + 4) * kind.width).view(-1, kind.width) % 13 + 44
    rows = [ready("rows", numbers.to(DTYPES[kind.row_dtype]))]
    if kind.row_dtype is RowDtype.INT8:
        rows.append(ready("row_scales", torch.rand(numbers.shape[0], 2)))
    managed = kind.remap not in {RemapKind.PLAIN, RemapKind.WIDE}
    parts = overlay_tensors(maps if managed else [], changed, rows, managed=managed)
    return {part.name: torch.cat([chunk.reshape(-1) for chunk in part.chunks()]).view(part.shape) for part in parts}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.remap}-{kind.row_dtype}")
def test_every_size_is_dynamic_in_both_artifacts(kind):
    traced, program = trace_shard(kind), ShardModule(kind)
    exported, script = load_exported(traced.exported), load_torchscript(traced.torchscript)
    hits = overlaid = 0
    for num_tables, ids_each, num_ids in itertools.product((0, 1, 2, 9), (0, 1, 50), (0, 1, 2, 7, 1000)):
        if num_tables == 0 and num_ids:
            continue
        state = state_of(kind, num_tables, ids_each)
        ids = torch.arange(num_ids) % 91 - 30
        lengths = torch.zeros(num_tables, dtype=torch.int64)
        if num_tables:
            lengths[0] += num_ids // 3
            lengths[-1] += num_ids - num_ids // 3
        want = program(ids, lengths, state)
        for artifact in (exported, script):
            got = artifact(ids, lengths, state)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (num_tables, ids_each, num_ids)
        units = torch.repeat_interleave(torch.arange(num_tables) % 2 + 1, lengths)
        rows = int(units.sum()) if kind.remap is RemapKind.WIDE else num_ids
        assert [tuple(part.shape) for part in want] == [(rows, kind.width), (num_ids,), (num_ids,), (num_ids,)]
        assert [part.dtype for part in want] == [torch.float32, torch.int64, torch.bool, torch.bool]
        hits += int(want[2].sum())
        overlaid += int(want[3].sum())
    assert hits
    assert overlaid


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.remap}-{kind.row_dtype}")
def test_a_program_runs_wherever_its_state_is(kind):
    program = torch.export.load(io.BytesIO(trace_shard(kind).exported))
    # Not run on the meta device: how many rows an overlay answers depends on numbers, which that one has none of.
    assert not [node for node in program.graph.nodes if "device" in node.kwargs]


def test_shards_of_one_kind_get_the_same_program(tmp_path):
    export_collection(plain_collection(), tmp_path, name="c", num_shards=3)
    directory = version_dir(tmp_path, "c", 1)
    assert len({(shard_dir(directory, shard) / "shard.pt2").read_bytes() for shard in range(3)}) == 1
