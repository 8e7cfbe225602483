"""Managed tables of every kind on the shards of one collection, held against TorchRec's modules one table at a time."""

import itertools

import pytest
import torch
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection

from export import export_collection
from export.contract import shard_dir, version_dir
from export.plans import make_plan
from tests.export.reader import row_bytes, served
from tests.modules import configs, fill_identities, hash_zch_module, managed_collection, map_of, spread_rows
from tests.oracle import TableOracle

ZCH = {
    "slot": {"fallback": "slot", "max_probe": 2, "buckets": 3},
    "reserved": {"fallback": "reserved", "max_probe": 9, "buckets": 2},
    "none": {"fallback": "none", "max_probe": 4, "buckets": 4, "input_hash_size": 1000},
    "default": {"fallback": "no_bag", "max_probe": 2, "buckets": 1},
}
"""One table of each kind of miss, probed to three different depths."""
ROWS = {"slot": 24, "mch": 12, "reserved": 24, "none": 16, "default": 12}
ODD_IDS = [-1, 0, 1, 7, 999, 1000, -1000, 2**62, 2**63 - 1, -(2**63)]


def collisions_of(module):
    return module._managed_collision_collection._managed_collision_modules


@pytest.fixture(scope="module")
def module():
    tables = configs(ROWS, dim=3)
    collection = EmbeddingCollection(tables=tables)
    spread_rows(collection)
    modules = {"mch": collisions_of(managed_collection({"mch": ROWS["mch"]}))["mch"]}
    for name, options in ZCH.items():
        modules[name] = hash_zch_module(ROWS[name], name=name, **options)
        fill_identities(modules[name], range(5, 1000, 41))
    return ManagedCollisionEmbeddingCollection(collection, ManagedCollisionCollection(modules, tables))


@pytest.fixture(scope="module")
def ids(module):
    return {name: [*map_of(module, name), *ODD_IDS, *range(5, 1000, 67)] for name in ROWS}


def wanted(module, name, ids, unknown):
    weight = module._embedding_module.embeddings[name].weight.detach()
    piece = collisions_of(module)[name]
    answer = TableOracle(weight_RD=weight, pieces=[piece], zero=unknown == "zero").look_up(torch.tensor(ids))
    rows = zip(answer.embeddings_ND, answer.row_ids_N.tolist(), answer.hits_N.tolist(), strict=True)
    return [(row_bytes(row), row_id, hit) for row, row_id, hit in rows]


def open_slots(module, table):
    if table.mpzch is None:
        return collisions_of(module)[table.name].open_slots()
    reserved = max(table.mpzch.num_reserved_slots, 0) * table.training.buckets
    return table.rows - reserved - len(map_of(module, table.name))


PLANS = {
    "one shard": {"shards": 1},
    "whole tables": {"shards": 2, "tables": {name: {"shard": at % 2} for at, name in enumerate(ROWS)}},
    "buckets": {"shards": 3, "tables": {name: {"routing": "training"} for name in ROWS}},
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("unknown", ["training", "zero"])
def test_tables_of_every_kind_answer_as_their_modules(tmp_path, module, ids, plan, unknown):
    manifest = export_collection(module, tmp_path, name="c", plan=make_plan(plan), unknown=unknown)
    for program in ("shard.pt2", "model.pt"):
        answers = served(tmp_path, manifest, ids, program)
        for name in ROWS:
            assert answers[name] == wanted(module, name, ids[name], unknown), (name, program)
    for table in manifest.tables:
        entries = [entry for shard in manifest.shards for entry in shard.tables if entry.table == table.name]
        assert sum(entry.zch_rows for entry in entries) == table.zch.occupied == len(map_of(module, table.name))
        assert sum(entry.zch_open_slots for entry in entries) == table.zch.open_slots == open_slots(module, table)


def test_a_shard_that_holds_its_own_state_answers_the_same(tmp_path, module, ids):
    plan = make_plan(PLANS["whole tables"])
    manifest = export_collection(module, tmp_path, name="c", plan=plan, runtime="pytorch", row_dtype="fp16")
    for shard in manifest.shards:
        place = shard_dir(version_dir(tmp_path, "c", 1), shard.index)
        assert sorted(path.name for path in place.iterdir()) == ["model.pt", "probes.safetensors"]
        program = torch.jit.load(place / "model.pt")
        names = [entry.table for entry in shard.tables]
        lengths = torch.tensor([len(ids[name]) for name in names])
        asked = torch.tensor([*itertools.chain.from_iterable(ids[name] for name in names)])
        rows, row_ids, hits = program(asked, lengths, torch.tensor([1]))
        found = list(zip(map(row_bytes, rows), row_ids.tolist(), hits.tolist(), strict=True))
        half = [
            (row_bytes(torch.frombuffer(bytearray(row), dtype=torch.float32).half().float()), row_id, hit)
            for name in names
            for row, row_id, hit in wanted(module, name, ids[name], "training")
        ]
        assert found == half
