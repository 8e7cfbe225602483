"""State is streamed: in pieces of a bounded size, with every row in its place, whatever the pieces are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import export.stored_rows
from export import export_collection
from export.contract import INT64_MAX, Placement, Routing, RowDtype, Unknown, as_unsigned, hash_shard
from export.mch_state import route_map
from export.reading import read_collection
from export.shard_state import build_state
from export.state import PlacedTable, write_state
from tests.export.reader import expected, served
from tests.modules import managed_collection, map_of, plain_collection, untrained_collection


def placed(module, num_shards, unknown=Unknown.TRAINING):
    return [
        PlacedTable(
            source=table,
            routing=Routing.HASH if table.map else Routing.ROWS,
            placements=tuple(
                Placement(shard=shard, row_start=0, row_stop=table.rows if table.map or shard == 0 else 0)
                for shard in range(num_shards)
            ),
            unknown=unknown,
        )
        for table in read_collection(module).tables
    ]


def state_of(module, shard=0, num_shards=1, row_dtype=RowDtype.FP32):
    return build_state(shard, num_shards, placed(module, num_shards), dim=4, row_dtype=row_dtype)


@pytest.mark.parametrize("chunk_bytes", [1, 48, 100, 1 << 20])
@pytest.mark.parametrize("unknown", ["training", "zero"])
def test_the_size_of_the_pieces_changes_nothing(tmp_path, monkeypatch, chunk_bytes, unknown):
    monkeypatch.setattr(export.stored_rows, "CHUNK_BYTES", chunk_bytes)
    module = managed_collection()
    manifest = export_collection(module, tmp_path, name="c", num_shards=2, unknown=unknown)
    ids = {table: [*map_of(module, table), 3] for table in ("user", "item")}
    answers = served(tmp_path, manifest, ids)
    assert all(answers[table] == expected(module, table, ids[table], unknown) for table in ids)


@pytest.mark.parametrize("make", [managed_collection, plain_collection])
def test_no_piece_of_rows_is_larger_than_allowed(monkeypatch, make):
    monkeypatch.setattr(export.stored_rows, "CHUNK_BYTES", 64)
    module = make()
    rows = state_of(module).tensors[-1]
    sizes = [chunk.numel() * 4 for chunk in rows.chunks()]
    assert max(sizes[:-1]) == 64
    assert sum(sizes) == rows.nbytes


def test_rows_of_a_range_are_read_without_a_copy_of_the_table():
    module = plain_collection({"user": 10})
    rows = state_of(module).tensors[-1]
    assert list(rows.chunks())[1].data_ptr() == module.embeddings["user"].weight.data_ptr()


def test_every_id_of_a_map_lies_on_one_shard_with_the_default_rows_on_all():
    module = managed_collection()
    states = [state_of(module, shard, 3) for shard in range(3)]
    tensors = [{tensor.name: torch.cat(list(tensor.chunks())) for tensor in state.tensors} for state in states]
    ids = [id_ for tensor in tensors for id_ in tensor["hash_table"][:, 0].tolist() if id_ != -1]
    assert sorted(ids) == sorted([*map_of(module, "user"), *map_of(module, "item")])
    assert all(tensor["row_ids"][tensor["unknown_rows"]].tolist() == [11, 19] for tensor in tensors)


@given(st.lists(st.integers(-INT64_MAX - 1, INT64_MAX - 1), unique=True, max_size=5), st.integers(1, 8))
def test_ids_are_routed_by_the_contracts_rule(ids, num_shards):
    module = untrained_collection({"user": 6})
    collision = module._managed_collision_collection._managed_collision_modules["user"]
    kept = sorted(set(ids) - {-1})
    collision._mch_sorted_raw_ids[: len(kept)] = torch.tensor(kept, dtype=torch.int64)
    routed = route_map(read_collection(module).tables[0].map, num_shards)
    assert routed.tolist() == [hash_shard(as_unsigned(id_), num_shards) for id_ in kept]


def test_progress_tells_the_bytes_of_the_file(tmp_path):
    told = []
    state = state_of(plain_collection())
    file = write_state(tmp_path / "state.safetensors", state, lambda *step: told.append(step))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1:] == (file.size_bytes, file.size_bytes)
    assert (tmp_path / "state.safetensors").stat().st_size == file.size_bytes
