"""What the exporter reads off a module, and what it refuses, naming the table."""

import random
import re

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from export import export_collection, maps
from export.errors import ExportError
from export.options import Evicted
from export.reading import read_collection
from tests.export.reader import served
from tests.modules import (
    FALLBACKS,
    configs,
    fill_identities,
    hash_zch_collection,
    managed_collection,
    map_of,
    plain_collection,
    probed_rows,
    untrained_collection,
)


def collision_of(module, table="user"):
    return module._managed_collision_collection._managed_collision_modules[table]


def test_a_managed_table_is_described_with_its_map():
    module = managed_collection(policy="lru")
    user = read_collection(module).tables[0]
    assert (user.name, user.rows, user.dim, user.features) == ("user", 12, 4, ("user",))
    assert user.map.policy == "LRU_EvictionPolicy"
    assert dict(zip(user.map.ids_K.tolist(), user.map.rows_K.tolist(), strict=True)) == map_of(module, "user")


def test_rows_are_not_copied():
    module = plain_collection()
    source = read_collection(module)
    assert source.tables[0].numbers.pieces[0].numbers.data_ptr() == module.embeddings["user"].weight.data_ptr()
    assert source.tables[0].map is None


@pytest.mark.parametrize(
    ("fallback", "default_row", "reserved"),
    [("slot", -1, -1), ("none", -1, -1), ("no_bag", 0, -1), ("reserved", -1, 3)],
)
def test_an_mpzch_table_is_described_with_its_buckets_and_its_misses(fallback, default_row, reserved):
    module = hash_zch_collection(
        {"user": 24}, buckets=2, fallback=fallback, input_hash_size=1000, eviction="SINGLE_TTL_EVICTION"
    )
    (table,) = read_collection(module).tables
    source = table.map
    assert dict(zip(source.ids_K.tolist(), source.rows_K.tolist(), strict=True)) == map_of(module, "user")
    assert source.identities_R.tolist() == collision_of(module)._hash_zch_identities[:, 0].tolist()
    reserved_slots = 2 * max(reserved, 0)
    assert source.open_slots == 24 - reserved_slots - len(map_of(module, "user")) > 0
    assert (source.training.row_edges, source.training.input_hash_size) == ((0, 12, 24), 1000)
    assert not source.training.floor_modulo
    assert source.policy == "SINGLE_TTL_EVICTION"
    assert (source.mpzch.default_row, source.mpzch.num_reserved_slots, source.mpzch.max_probe) == (
        default_row,
        reserved,
        4,
    )


def test_mpzch_without_an_input_hash_size_takes_the_floor_modulo():
    (table,) = read_collection(hash_zch_collection({"user": 24}, buckets=2)).tables
    assert table.map.training.floor_modulo


@pytest.mark.parametrize("fallback", ["slot", "reserved"])
def test_open_slots_of_mpzch_are_those_of_each_shards_own_rows(tmp_path, fallback):
    module = hash_zch_collection({"user": 48}, buckets=4, fallback=fallback)
    manifest = export_collection(module, tmp_path, name="c", num_shards=3)
    table = manifest.tables[0]
    reserved = max(table.mpzch.num_reserved_slots, 0)
    entries = [entry for shard in manifest.shards for entry in shard.tables]
    buckets = [sum(piece.row_start <= edge < piece.row_stop for edge in (0, 12, 24, 36)) for piece in table.placements]
    capacity = [(12 - reserved) * count for count in buckets]
    assert [entry.zch_open_slots + entry.zch_rows for entry in entries] == capacity
    assert sum(entry.zch_open_slots for entry in entries) == table.zch.open_slots > 0


def crowd(module, seed):
    """Ids in any of the slots that are probed for them, one on top of another, as evictions by many threads leave them."""
    draw = random.Random(seed)
    top = module.input_size() or 2**62
    probed = probed_rows(module, [draw.randrange(top) for _ in range(2 * module.output_size())])
    slots = {}
    for id_, rows in draw.choices(list(probed.items()), k=4 * module.output_size()):
        slots[draw.choice(rows)] = id_
    with torch.no_grad():
        module._hash_zch_identities.fill_(-1)
        for row, id_ in slots.items():
            module._hash_zch_identities[row] = id_
    return {id_: next(row for row in probed[id_] if slots.get(row) == id_) for id_ in slots.values()}


@pytest.mark.parametrize("fallback", FALLBACKS)
@pytest.mark.parametrize(("buckets", "input_hash_size"), [(1, 0), (3, 0), (4, 1000)])
def test_an_id_in_several_slots_answers_as_the_one_that_is_probed_first(tmp_path, fallback, buckets, input_hash_size):
    module = hash_zch_collection({"user": 48}, buckets=buckets, fallback=fallback, input_hash_size=input_hash_size)
    rows = crowd(collision_of(module), seed=buckets)
    manifest = export_collection(module, tmp_path, name="c", num_shards=2)
    answers = served(tmp_path, manifest, {"user": list(rows)})["user"]
    assert [(row, hit) for _, row, hit in answers] == [(row, True) for row in rows.values()]
    taken = int((collision_of(module)._hash_zch_identities != -1).sum())
    assert manifest.tables[0].zch.occupied == taken > len(rows)


@pytest.mark.parametrize(
    ("option", "trained", "built"),
    [("max_probe", 8, 2), ("input_hash_size", 1000, 3000), ("fallback", "slot", "reserved")],
)
def test_identities_that_a_module_of_other_options_does_not_find_are_refused(monkeypatch, option, trained, built):
    monkeypatch.setattr(maps, "_IDS_AT_ONCE", 7)
    options = {"buckets": 2, "input_hash_size": 1000}
    module = hash_zch_collection({"user": 48}, **options | {option: built})
    rows = fill_identities(
        collision_of(hash_zch_collection({"user": 48}, **options | {option: trained})), range(0, 999, 9)
    )
    with torch.no_grad():
        collision_of(module)._hash_zch_identities.fill_(-1)
        for id_, row in rows.items():
            collision_of(module)._hash_zch_identities[row] = id_
    message = rf"table user: \d+ of {len(rows)} ids are not found where they lie by a module of 2 buckets and max_probe"
    with pytest.raises(ExportError, match=message):
        read_collection(module)


@pytest.mark.parametrize("shape", [torch.zeros(24, 1, dtype=torch.int32), torch.zeros(24, 2, dtype=torch.int64)])
def test_identities_that_the_kernel_cannot_serve_are_refused(shape):
    module = hash_zch_collection({"user": 24})
    collision_of(module)._hash_zch_identities = nn.Parameter(shape, requires_grad=False)
    with pytest.raises(ExportError, match=r"table user: identities are torch\.int.*only INT64 \[R, 1\] is served"):
        read_collection(module)


def test_evictions_of_mpzch_that_nobody_consumed_are_refused_or_read_as_zeros():
    module = hash_zch_collection({"user": 24})
    evicted = collision_of(module)._evicted_indices = [torch.tensor([3, 5]), torch.tensor([3])]
    with pytest.raises(ExportError, match=r"table user: .*--evicted reset"):
        read_collection(module)
    (table,) = read_collection(module, evicted=Evicted.RESET).tables
    weight = module._embedding_module.embeddings["user"].weight.detach()
    zeroed = weight.clone()
    zeroed[[3, 5]] = 0.0
    assert torch.equal(table.numbers.read(0, 24), zeroed)
    assert torch.equal(table.numbers.gather(torch.tensor([5, 4])), zeroed[[5, 4]])
    assert bool(weight[[3, 5]].all())
    assert collision_of(module)._evicted_indices is evicted


def test_need_indices_is_read():
    assert not read_collection(plain_collection()).need_indices
    assert read_collection(EmbeddingCollection(tables=configs({"user": 4}), need_indices=True)).need_indices


def bag_collection():
    return EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="user", num_embeddings=4, embedding_dim=4, feature_names=["user"])]
    )


def managed_bag_collection():
    bags = bag_collection()
    module = MCHManagedCollisionModule(
        zch_size=4, device=torch.device("cpu"), eviction_policy=LFU_EvictionPolicy(), eviction_interval=1
    )
    return ManagedCollisionEmbeddingBagCollection(
        bags, ManagedCollisionCollection({"user": module}, bags.embedding_bag_configs())
    )


def zero_collision_collection():
    tables = configs({"user": 8})
    module = HashZchManagedCollisionModule(zch_size=8, device=torch.device("cpu"), total_num_buckets=2)
    module._hash_zch_bucket.fill_(4)
    return ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=tables), ManagedCollisionCollection({"user": module}, tables)
    )


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")  # upstream's own, of MPZCH
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bag_collection, "EmbeddingBagCollection gives pooled embeddings"),
        (managed_bag_collection, "ManagedCollisionEmbeddingBagCollection gives pooled embeddings"),
        (lambda: nn.Linear(2, 2), "Linear cannot be exported: pass an EmbeddingCollection"),
        (zero_collision_collection, "table user: its state was saved with 4 buckets, the module has 2"),
        (lambda: EmbeddingCollection(tables=[]), "no tables"),
        (
            lambda: EmbeddingCollection(tables=configs({"user": 4}), device=torch.device("meta")),
            "table user: .*meta device",
        ),
        (
            lambda: EmbeddingCollection(
                tables=[EmbeddingConfig(name="user", num_embeddings=4, embedding_dim=4, feature_names=["u", "u"])]
            ),
            "table user: features .* name one twice",
        ),
    ],
)
def test_a_module_that_is_not_served_is_refused_by_name(make, message):
    with pytest.raises(ExportError, match=message):
        read_collection(make())


def test_evictions_that_nobody_consumed_are_refused():
    module = managed_collection()
    collision_of(module, "item")._evicted = True
    with pytest.raises(ExportError, match=r"table item: .*call evict\(\)"):
        read_collection(module)


def test_training_on_ids_that_the_map_holds_already_evicts_nothing_and_is_served():
    module = managed_collection(steps=6)
    collision = collision_of(module)
    before = collision._mch_sorted_raw_ids.clone()
    ids = before[:10].repeat(2)
    module.train()
    for _ in range(4):
        collision({"ids": JaggedTensor(values=ids, lengths=torch.ones_like(ids))})
    assert torch.equal(before, collision._mch_sorted_raw_ids)
    assert (collision._evicted, collision._evicted_emb_indices.numel()) == (True, 0)
    assert read_collection(module, evicted=Evicted.REFUSE).tables[0].map is not None


def test_an_eviction_of_mpzch_that_took_no_id_is_no_eviction():
    module = hash_zch_collection({"user": 24})
    collision_of(module)._evicted_indices = [torch.empty(0, dtype=torch.int64)]
    assert read_collection(module).tables[0].map is not None


def test_one_ranks_piece_of_a_map_is_refused():
    module = untrained_collection({"user": 4})
    collision_of(module)._output_global_offset = 4
    with pytest.raises(ExportError, match=r"table user: .*rows 4\.\.8 of 4.*one rank's piece"):
        read_collection(module)


@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [
        ([5, 3], [0, 1], "not sorted"),
        ([3, 3], [0, 1], "holds an id twice"),
        ([3, 5], [0, 9], "points outside rows 0..4"),
    ],
)
def test_a_broken_map_is_refused(ids, rows, message):
    module = untrained_collection({"user": 4})
    collision_of(module)._mch_sorted_raw_ids[:2] = torch.tensor(ids)
    collision_of(module)._mch_remapped_ids_mapping[:2] = torch.tensor(rows)
    with pytest.raises(ExportError, match=f"table user: .*{message}"):
        read_collection(module)


def test_a_map_on_the_meta_device_is_refused():
    module = untrained_collection({"user": 4})
    collision_of(module)._mch_sorted_raw_ids = collision_of(module)._mch_sorted_raw_ids.to("meta")
    with pytest.raises(ExportError, match="table user: its id map is on the meta device"):
        read_collection(module)


def test_rows_of_another_shape_than_the_config_says_are_refused():
    module = plain_collection()
    module.embeddings["item"] = nn.Embedding(5, 4)
    with pytest.raises(ExportError, match=r"table item: its rows have shape \(5, 4\), its config says \(23, 4\)"):
        read_collection(module)


def test_two_features_whose_outputs_would_have_one_name_are_refused():
    module = plain_collection({"t": 4, "u": 4}, {"t": ["a@u", "a"], "u": ["a"]})
    with pytest.raises(
        ExportError,
        match="feature 'a@u' of table t and feature 'a' of table u both have the embedding name 'a@u'; rename a feature",
    ):
        read_collection(module)


@pytest.mark.parametrize(("table", "feature"), [("user", "a\ud800"), ("\udcff", "a")])
def test_a_name_that_no_manifest_can_carry_is_refused(table, feature):
    module = plain_collection({table: 4}, {table: [feature]})
    bad = feature if table == "user" else table
    with pytest.raises(ExportError, match=re.escape(f"table {table!r}: the name {bad!r} has no UTF-8 form; rename it")):
        read_collection(module)
