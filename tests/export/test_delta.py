"""Deltas: base and overlay together answer as the module does now, whatever changed, at every cut."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from export import export_collection, export_delta, verify_version
from export.contract import INT64_MAX, Kind, read_manifest, version_dir, versions
from export.errors import ExportError
from tests.export.reader import expected, served
from tests.modules import (
    FALLBACKS,
    fill_identities,
    hash_zch_collection,
    managed_collection,
    map_of,
    modulo_hash,
    plain_collection,
    probed_rows,
    spread_rows,
    train,
)

TABLES = ("user", "item")
STRANGERS = [-1, INT64_MAX, INT64_MAX - 1, -INT64_MAX - 1, 0, 5, 17]


def ids_of(*maps):
    """Every id that any of the maps holds or held, and strangers."""
    return {table: [*dict.fromkeys(itertools.chain(*(held[table] for held in maps), STRANGERS))] for table in TABLES}


def maps_of(module):
    return {table: map_of(module, table) for table in TABLES}


def weight_of(module, table):
    return getattr(module, "_embedding_module", module).embeddings[table].weight


@pytest.mark.parametrize(("num_shards", "row_dtype"), [(1, "fp32"), (2, "fp16"), (3, "fp32"), (5, "int8"), (8, "fp32")])
def test_evicted_new_and_kept_ids_answer_as_the_module_does_now(tmp_path, num_shards, row_dtype):
    module = managed_collection()
    base = export_collection(module, tmp_path, name="c", num_shards=num_shards, row_dtype=row_dtype)
    before = maps_of(module)
    evictions = dict.fromkeys(TABLES, 0)
    for round_ in range(3):
        last = maps_of(module)
        train(module, steps=4, seed=round_ + 1, first_step=12 + 4 * round_)
        delta = export_delta(module, tmp_path, name="c")
        now = maps_of(module)
        assert (delta.kind, delta.base, delta.version, delta.previous) == (Kind.DELTA, 1, round_ + 2, round_ + 1)
        verify_version(tmp_path, "c", module, delta.version)
        answers = served(tmp_path, delta, ids_of(before, last, now))
        for table in TABLES:
            evictions[table] += len(set(last[table]) - set(now[table]))
            assert delta.table(table).zch.evictions == evictions[table]
            held = [entry for shard in delta.shards for entry in shard.tables if entry.table == table]
            assert sum(entry.evicted for entry in held) == len(set(last[table]) - set(now[table]))
            assert sum(entry.overlay_tombstones for entry in held) == len(set(before[table]) - set(now[table]))
            moved = {id_ for id_, row in now[table].items() if before[table].get(id_) != row}
            assert sum(entry.overlay_ids for entry in held) == len(moved)
            assert sum(entry.zch_rows for entry in held) == len(now[table])
            if row_dtype == "fp32":
                assert answers[table] == expected(module, table, ids_of(before, last, now)[table])
    assert all(evictions.values())
    assert read_manifest(tmp_path, "c", 1) == base


def test_any_delta_can_be_skipped_because_each_is_cumulative(tmp_path):
    module = managed_collection()
    export_collection(module, tmp_path, name="c", num_shards=2)
    before = maps_of(module)
    for round_ in range(3):
        train(module, steps=2, seed=round_ + 1, first_step=12 + 2 * round_)
        export_delta(module, tmp_path, name="c", base=1)
    for version in (2, 3):  # the deltas in between may be gone
        for path in sorted(version_dir(tmp_path, "c", version).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    verify_version(tmp_path, "c", module, 4)
    ids = ids_of(before, maps_of(module))
    answers = served(tmp_path, read_manifest(tmp_path, "c", 4), ids)
    assert all(answers[table] == expected(module, table, ids[table]) for table in TABLES)


def test_a_delta_of_nothing_answers_as_its_base(tmp_path):
    module = managed_collection()
    export_collection(module, tmp_path, name="c", num_shards=2)
    delta = export_delta(module, tmp_path, name="c")
    entries = [entry for shard in delta.shards for entry in shard.tables]
    assert not any(entry.overlay_ids or entry.overlay_tombstones or entry.overlay_rows for entry in entries)
    ids = ids_of(maps_of(module))
    assert served(tmp_path, delta, ids) == served(tmp_path, read_manifest(tmp_path, "c", 1), ids)


def test_a_row_that_unknown_ids_get_changes_with_it(tmp_path):
    module = managed_collection()
    export_collection(module, tmp_path, name="c", num_shards=3)
    with torch.no_grad():
        weight_of(module, "user")[-1] += 1
    delta = export_delta(module, tmp_path, name="c")
    assert served(tmp_path, delta, {"user": STRANGERS})["user"] == expected(module, "user", STRANGERS)


@pytest.mark.parametrize("unknown", ["training", "zero"])
def test_the_rules_are_the_bases(tmp_path, unknown):
    module = managed_collection(input_hash=modulo_hash)
    export_collection(module, tmp_path, name="c", num_shards=2, unknown=unknown, row_dtype="fp16")
    train(module, steps=4, seed=3, first_step=12)
    delta = export_delta(module, tmp_path, name="c")
    assert {table.unknown for table in delta.tables} == {unknown}
    assert {table.row_dtype for table in delta.tables} == {"fp16"}
    verify_version(tmp_path, "c", module)


@settings(max_examples=12, deadline=None)
@given(
    cut=st.sampled_from(
        [
            {"user": {"rows": [4, 0, 6]}, "item": {"columns": [[1, 3], [0, 6], [1, 3]]}},
            {"user": {"shards": "all"}, "item": {"shard": 2}},
            {"user": {"columns": [[2, 9], [2, 3]]}, "item": {"rows": [[2, 20], [0, 3]]}},
        ]
    ),
    row_dtype=st.sampled_from(["fp32", "fp16", "int8"]),
    changed=st.dictionaries(st.sampled_from(["user", "item", "one"]), st.sets(st.integers(0, 22), max_size=5)),
)
def test_rows_of_plain_tables_change_under_every_cut(tmp_path_factory, cut, row_dtype, changed):
    repo = tmp_path_factory.mktemp("repo")
    module = plain_collection(dim=12)
    plan = repo / "plan.yaml"
    plan.write_text(str({"shards": 3, "tables": cut}).replace("'", ""))
    export_collection(module, repo, name="c", plan=plan, row_dtype=row_dtype, out_of_range="zero")
    with torch.no_grad():
        for table, rows in changed.items():
            weight = weight_of(module, table)
            weight[[row for row in rows if row < weight.shape[0]]] *= -1.5
    delta = export_delta(module, repo, name="c")
    verify_version(repo, "c", module)
    if row_dtype == "fp32":
        ids = {"user": range(-1, 11), "item": range(-1, 24), "one": range(-1, 2)}
        answers = served(repo, delta, {table: list(some) for table, some in ids.items()})
        assert all(answers[table] == expected(module, table, list(ids[table])) for table in ids)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: plain_collection({"user": 10, "item": 24, "one": 1}), "table item: the module has rows 24, it 23"),
        (lambda: plain_collection({"user": 10}), r"the module has tables \['user'\], it \['user', 'item', 'one'\]"),
        (lambda: plain_collection(dim=8), "table user: the module has dim 8, it 4"),
        (lambda: managed_collection({"user": 10, "item": 23, "one": 1}), "the module has remap mch, it none"),
    ],
)
def test_a_module_of_other_tables_is_refused_in_one_line(tmp_path, other, words):
    export_collection(plain_collection(), tmp_path, name="c")
    with pytest.raises(ExportError, match=f"no delta on base 1 of 'c': .*{words}; export a new base"):
        export_delta(other(), tmp_path, name="c")
    assert versions(tmp_path, "c") == [1]


def test_a_base_that_cannot_be_one_is_refused(tmp_path):
    module = plain_collection()
    with pytest.raises(ExportError, match="holds no base of 'c'"):
        export_delta(module, tmp_path, name="c")
    export_collection(module, tmp_path, name="c")
    export_delta(module, tmp_path, name="c")
    with pytest.raises(ExportError, match=r"base 2: is a delta itself, on base 1; .* use --base 1"):
        export_delta(module, tmp_path, name="c", base=2)
    with pytest.raises(ExportError, match=r"published versions: \[1, 2\]"):
        export_delta(module, tmp_path, name="c", base=7)
    export_collection(module, tmp_path, name="late", version=5)
    with pytest.raises(ExportError, match="version 3: a delta comes after its base, which is 5; leave version out"):
        export_delta(module, tmp_path, name="late", version=3)
    export_collection(module, tmp_path, name="p", runtime="pytorch")
    with pytest.raises(ExportError, match="runtime 'pytorch' keeps its state inside"):
        export_delta(module, tmp_path, name="p")
    assert versions(tmp_path, "c") == [1, 2]


def test_the_newest_base_is_taken_and_evictions_are_counted_over_bases(tmp_path):
    module = managed_collection()
    export_collection(module, tmp_path, name="c", num_shards=2)
    last, total = maps_of(module), 0
    for step in range(4):
        train(module, steps=3, seed=step + 9, first_step=12 + 3 * step)
        published = (
            export_delta(module, tmp_path, name="c")
            if step % 2
            else export_collection(module, tmp_path, name="c", num_shards=step + 1)
        )
        now = maps_of(module)
        total += len(set(last["user"]) - set(now["user"]))
        assert published.table("user").zch.evictions == total
        assert published.base == published.version - step % 2
        last = now
    assert total


def test_a_damaged_overlay_is_caught_by_verify(tmp_path):
    module = managed_collection()
    export_collection(module, tmp_path, name="c")
    spread_rows(module._embedding_module, seed=4)
    export_delta(module, tmp_path, name="c")
    path = version_dir(tmp_path, "c", 2) / "shard_0" / "overlay.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ExportError, match=r"overlay\.safetensors: its SHA-256 differs"):
        verify_version(tmp_path, "c", module)


@pytest.mark.parametrize("fallback", FALLBACKS)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_mpzch_ids_come_go_and_miss_as_the_kernel_says(tmp_path, fallback, num_shards):
    module = hash_zch_collection({"user": 24, "item": 36}, fallback=fallback, buckets=6)
    export_collection(module, tmp_path, name="c", num_shards=num_shards)
    collisions = module._managed_collision_collection._managed_collision_modules
    before = {table: set(map_of(module, table)) for table in TABLES}
    for round_ in range(2):
        for number, table in enumerate(TABLES):
            fill_identities(
                collisions[table], [*sorted(before[table])[round_::2], *range(1000 * number, 1000 * number + 9)]
            )
        with torch.no_grad():
            for table in TABLES:
                weight_of(module, table)[:: 2 + round_] += 1  # row 0 is what no_bag answers to a miss
        delta = export_delta(module, tmp_path, name="c")
        assert verify_version(tmp_path, "c", module).version == delta.version == round_ + 2
        gone = sum(entry.overlay_tombstones for shard in delta.shards for entry in shard.tables)
        assert gone == sum(len(before[table] - set(map_of(module, table))) for table in TABLES)


@pytest.mark.parametrize("kept", [(0,), (1,), (0, 1), ()])
@pytest.mark.parametrize("first", [(0,), (1,), (0, 1), ()])
def test_an_id_may_lie_in_several_slots_of_an_mpzch_table_before_and_after(tmp_path, first, kept):
    module = hash_zch_collection({"user": 16})
    collision = module._managed_collision_collection._managed_collision_modules["user"]
    slots = probed_rows(collision, [777])[777]

    def place(which):
        with torch.no_grad():
            collision._hash_zch_identities.fill_(-1)
            for at in which:
                collision._hash_zch_identities[slots[at]] = 777

    place(first)
    export_collection(module, tmp_path, name="c")
    place(kept)
    export_delta(module, tmp_path, name="c")
    assert verify_version(tmp_path, "c", module).version == 2
