"""An exported version answers as the trained module does: every policy, routing, shard count and kind of id."""

import copy
import functools
import hashlib
import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from export import export_collection, verify_version
from export.contract import INT64_MAX, Manifest, Routing, read_manifest, versions
from export.errors import ExportError
from export.plans import Plan, TablePlan
from tests.export.reader import expected, row_bytes, served
from tests.modules import (
    POLICIES,
    managed_collection,
    map_of,
    modulo_hash,
    plain_collection,
    train,
    untrained_collection,
)

EDGE_IDS = [-1, INT64_MAX, INT64_MAX - 1, -INT64_MAX - 1, 0, 1, 2**62]


@functools.cache
def managed(policy: str, dim: int):
    return managed_collection(
        {"user": 12, "item": 20, "one": 1}, {"user": ["u", "shared"], "item": ["shared"]}, policy=policy, dim=dim
    )


@functools.cache
def plain(dim: int):
    return plain_collection({"user": 10, "item": 23, "one": 1}, {"user": ["u", "shared"], "item": ["shared"]}, dim=dim)


def buffers_digest(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted({**dict(module.named_buffers()), **dict(module.named_parameters())}.items()):
        digest.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    for name, part in module.named_modules():
        digest.update(f"{name} {part.training} {getattr(part, '_evicted', None)}".encode())
    return digest.hexdigest()


@st.composite
def plans(draw, tables: dict[str, int], routings: tuple[Routing, ...]) -> Plan:
    shards = draw(st.integers(1, 8))
    chosen = {}
    for name, rows in tables.items():
        routing = draw(st.sampled_from((None, *routings)))
        if routing is Routing.TABLE:
            chosen[name] = TablePlan(routing=routing, shard=draw(st.integers(0, shards - 1)))
        elif routing is Routing.ROWS:
            cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=shards - 1, max_size=shards - 1)))
            edges = [0, *cuts, rows]
            chosen[name] = TablePlan(routing=routing, rows=tuple(b - a for a, b in itertools.pairwise(edges)))
        elif routing is not None:
            chosen[name] = TablePlan(routing=routing)
    return Plan(shards=shards, tables=chosen)


LAW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@LAW
@given(st.data())
def test_managed_tables_answer_alike_at_every_shard_count_and_routing(data):
    module = managed(data.draw(st.sampled_from(sorted(POLICIES))), data.draw(st.sampled_from([3, 4, 64])))
    tables = {"user": 12, "item": 20, "one": 1}
    plan = data.draw(plans(tables, (Routing.HASH, Routing.TABLE)))
    unknown = data.draw(st.sampled_from(["training", "zero"]))
    ids = {}
    for table in tables:
        known = sorted(map_of(module, table)) or [5]
        pool = st.one_of(st.sampled_from(known), st.sampled_from(EDGE_IDS), st.integers(-INT64_MAX - 1, INT64_MAX))
        ids[table] = data.draw(st.lists(pool, max_size=30)) + known
    with tempfile.TemporaryDirectory() as directory:
        manifest = export_collection(module, directory, name="c", plan=plan, unknown=unknown)
        answers = served(Path(directory), manifest, ids)
    for table in tables:
        assert answers[table] == expected(module, table, ids[table], unknown)


@LAW
@given(st.data())
def test_plain_tables_answer_alike_at_every_shard_count_and_routing(data):
    module = plain(data.draw(st.sampled_from([3, 4, 64])))
    tables = {"user": 10, "item": 23, "one": 1}
    plan = data.draw(plans(tables, (Routing.ROWS, Routing.TABLE)))
    pool = st.one_of(st.integers(-2, 25), st.sampled_from(EDGE_IDS))
    ids = {table: data.draw(st.lists(pool, max_size=30)) + list(range(rows)) for table, rows in tables.items()}
    with tempfile.TemporaryDirectory() as directory:
        manifest = export_collection(module, directory, name="c", plan=plan)
        answers = served(Path(directory), manifest, ids)
    for table in tables:
        assert answers[table] == expected(module, table, ids[table])


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_both_programs_answer_as_the_modules_own_forward(tmp_path, num_shards):
    module = managed_collection(policy="distance_lfu")
    manifest = export_collection(module, tmp_path, name="c", num_shards=num_shards)
    user = [*map_of(module, "user"), 7, -9, 7, 2**62]
    item = [*map_of(module, "item"), 8, -3]
    kjt = KeyedJaggedTensor(
        keys=["user", "item"], values=torch.tensor(user + item), lengths=torch.tensor([len(user), len(item)])
    )
    with torch.no_grad():
        features, _ = copy.deepcopy(module).eval()(kjt)
    for program in ("shard.pt2", "model.pt"):
        answers = served(tmp_path, manifest, {"user": user, "item": item}, program)
        for feature in ("user", "item"):
            assert [row[0] for row in answers[feature]] == [row_bytes(row) for row in features[feature].values()]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_evicted_ids_answer_as_unknown_ids(tmp_path, policy):
    module = managed_collection(steps=4, policy=policy)
    before = set(map_of(module, "item"))
    train(module, steps=12, seed=9)
    evicted = sorted(before - set(map_of(module, "item")))
    assert evicted
    manifest = export_collection(module, tmp_path, name="c", num_shards=3)
    rows = served(tmp_path, manifest, {"item": [*evicted, 123]})["item"]
    assert len(set(rows)) == 1
    assert rows[0][1:] == (19, False)


def test_answers_depend_on_names_not_on_the_order_of_the_module_dict(tmp_path):
    module = managed_collection(reverse_modules=True)
    manifest = export_collection(module, tmp_path, name="c", num_shards=2)
    assert [table.name for table in manifest.tables] == ["user", "item"]
    ids = {table: [*map_of(module, table), 3] for table in ("user", "item")}
    answers = served(tmp_path, manifest, ids)
    assert all(answers[table] == expected(module, table, ids[table]) for table in ids)


def test_a_feature_of_several_tables_is_named_as_in_torchrec(tmp_path):
    manifest = export_collection(plain(4), tmp_path, name="c")
    assert [name for _, _, name in manifest.embeddings] == ["u", "shared@user", "shared@item", "one"]
    assert manifest.features == ("u", "shared", "one")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_module_exported_before_training_knows_no_id(tmp_path, policy):
    module = untrained_collection(policy=policy)
    manifest = export_collection(module, tmp_path, name="c", num_shards=2)
    assert served(tmp_path, manifest, {"user": [0, 5, -1, INT64_MAX]})["user"] == expected(
        module, "user", [0, 5, -1, INT64_MAX]
    )
    assert [table.zch.occupied for table in manifest.tables] == [0, 0]


@pytest.mark.parametrize("make", [managed_collection, plain_collection])
@pytest.mark.parametrize("training", [True, False])
def test_the_module_is_left_as_it_was_found(tmp_path, make, training):
    module = make()
    module.train(training)
    module.training = not training  # the root alone: every part keeps its own flag
    before = buffers_digest(module)
    export_collection(module, tmp_path, name="c", num_shards=2)
    verify_version(tmp_path, "c", module)
    assert buffers_digest(module) == before


def test_shards_counts_add_up_to_the_modules_own(tmp_path):
    module = managed_collection(steps=1, eviction_interval=1, rows={"user": 40, "item": 3})
    manifest = export_collection(module, tmp_path, name="c", num_shards=3)
    collisions = module._managed_collision_collection._managed_collision_modules
    for table in manifest.tables:
        entries = [entry for shard in manifest.shards for entry in shard.tables if entry.table == table.name]
        assert sum(entry.zch_open_slots for entry in entries) == int(collisions[table.name].open_slots())
        assert sum(entry.zch_rows for entry in entries) == table.zch.occupied == len(map_of(module, table.name))
        assert sum(entry.rows for entry in entries) == table.zch.occupied + 3


def test_a_sentinel_that_the_map_learned_is_unknown_and_said_so(tmp_path, caplog):
    module = untrained_collection({"user": 5})
    collision = module._managed_collision_collection._managed_collision_modules["user"]
    collision._mch_sorted_raw_ids[:3] = torch.tensor([-7, -1, 4])
    manifest = export_collection(module, tmp_path, name="c", num_shards=2)
    assert "table user" in caplog.text
    assert [row[1:] for row in served(tmp_path, manifest, {"user": [-7, -1, 4]})["user"]] == [
        (0, True),
        (4, False),
        (2, True),
    ]
    assert manifest.tables[0].zch.occupied == 2


def test_rows_of_nan_infinity_and_negative_zero_are_kept_bit_by_bit(tmp_path):
    module = plain_collection({"user": 4})
    with torch.no_grad():
        module.embeddings["user"].weight[1] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    manifest = export_collection(module, tmp_path, name="c", num_shards=2)
    assert served(tmp_path, manifest, {"user": [1]})["user"] == expected(module, "user", [1])


def test_half_precision_rows_are_served_as_torchrec_widens_them(tmp_path):
    module = managed_collection(fp16=["user"])
    manifest = export_collection(module, tmp_path, name="c", num_shards=2)
    ids = [*map_of(module, "user"), 1]
    assert served(tmp_path, manifest, {"user": ids})["user"] == expected(module, "user", ids)


def test_versions_count_up_and_are_never_replaced(tmp_path):
    module = plain_collection()
    assert [export_collection(module, tmp_path, name="c").version for _ in range(2)] == [1, 2]
    assert export_collection(module, tmp_path, name="c", version=7).version == 7
    assert export_collection(module, tmp_path, name="c").version == 8
    with pytest.raises(ExportError, match=r"version 7 of 'c' exists.*--version 9"):
        export_collection(module, tmp_path, name="c", version=7)
    assert versions(tmp_path, "c") == [1, 2, 7, 8]


def test_the_manifest_on_disk_is_the_one_returned(tmp_path):
    manifest = export_collection(managed_collection(input_hash=modulo_hash), tmp_path, name="c", num_shards=2)
    assert isinstance(manifest, Manifest)
    assert read_manifest(tmp_path, "c", 1) == manifest


def test_tables_that_share_an_input_hash_share_its_file(tmp_path):
    manifest = export_collection(managed_collection(input_hash=modulo_hash), tmp_path, name="c")
    assert [table.input_hash for table in manifest.tables] == ["input_hash_0.pt2", "input_hash_0.pt2"]
    assert [file.path for file in manifest.files if "input_hash" in file.path] == ["input_hash_0.pt2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 0}, "num_shards 0"),
        ({"num_shards": 2, "plan": Plan(shards=2)}, "both given"),
        ({"plan": {"shards": 2}}, "dict is not read"),
        ({"version": 0}, "version 0: use a whole number from 1 to 9223372036854775807"),
        ({"version": "3"}, "version '3': use a whole number"),
        ({"version": 2**63}, "version 9223372036854775808: use a whole number"),
        ({"unknown": "zero"}, "use out_of_range"),
        ({"out_of_range": "nothing"}, "out_of_range 'nothing': use one of reject, zero"),
        ({"name": "a/b"}, "collection name 'a/b'"),
        ({"name": "a_shard_1"}, "_shard_"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_and_nothing_is_written(tmp_path, options, message):
    repo = tmp_path / "repo"
    with pytest.raises(ExportError, match=message):
        export_collection(plain_collection(), repo, **{"name": "c", **options})
    assert not versions(repo, "c")
    assert not list(repo.glob("c_shard_*"))


def test_out_of_range_is_no_option_of_managed_tables(tmp_path):
    with pytest.raises(ExportError, match="so use unknown"):
        export_collection(managed_collection(), tmp_path, name="c", out_of_range="zero")
