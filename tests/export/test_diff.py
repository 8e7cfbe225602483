"""The difference of two versions is what clients see, whatever the versions were cut and made from."""

import pytest
import torch

from export import export_collection, export_delta
from export.diff import TableDiff, diff_versions
from export.errors import ExportError
from tests.modules import managed_collection, map_of, plain_collection, train


def weights(module, table):
    return module._embedding_module.embeddings[table].weight.detach().clone()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_ids_and_rows_are_counted_as_the_maps_and_weights_say(tmp_path, num_shards):
    module = managed_collection()
    export_collection(module, tmp_path, name="c", num_shards=num_shards)
    before = {table: (map_of(module, table), weights(module, table)) for table in ("user", "item")}
    train(module, steps=8, seed=4, first_step=12)
    with torch.no_grad():
        for embedding in module._embedding_module.embeddings.values():
            embedding.weight[::2] += 1
    export_delta(module, tmp_path, name="c")
    export_collection(module, tmp_path, name="c", num_shards=2)
    for newer in (2, 3):
        for found in diff_versions(tmp_path, "c", 1, newer):
            held, numbers = before[found.table]
            now, new_numbers = map_of(module, found.table), weights(module, found.table)
            same = [id_ for id_ in now if held.get(id_) == now[id_]]
            assert found == TableDiff(
                table=found.table,
                added=len(now.keys() - held.keys()),
                evicted=len(held.keys() - now.keys()),
                moved=len([id_ for id_ in now if id_ in held and held[id_] != now[id_]]),
                changed=len([id_ for id_ in same if not torch.equal(numbers[now[id_]], new_numbers[now[id_]])]),
            )
            assert found.added
            assert found.evicted
            assert found.changed
    assert diff_versions(tmp_path, "c", 2, 3) == tuple(TableDiff(table=table) for table in ("user", "item"))


def test_rows_of_plain_tables_are_counted_under_every_cut(tmp_path):
    module = plain_collection()
    plan = tmp_path / "plan.yaml"
    plan.write_text("{shards: 2, tables: {user: {columns: [[1, 3], [0, 1]]}, item: {shards: all}}}")
    export_collection(module, tmp_path, name="c", plan=plan)
    with torch.no_grad():
        module.embeddings["user"].weight[[1, 9], 3] += 1
        module.embeddings["item"].weight[22] += 1
    export_delta(module, tmp_path, name="c")
    assert diff_versions(tmp_path, "c", 1, 2) == (
        TableDiff(table="user", changed=2),
        TableDiff(table="item", changed=1),
        TableDiff(table="one"),
    )


def test_versions_that_cannot_be_compared_are_named(tmp_path):
    export_collection(plain_collection(), tmp_path, name="c")
    export_collection(plain_collection({"user": 10}), tmp_path, name="c")
    with pytest.raises(ExportError, match="versions 1 and 2 of 'c' are of different tables"):
        diff_versions(tmp_path, "c", 1, 2)
    with pytest.raises(ExportError, match=r"published versions: \[1, 2\]"):
        diff_versions(tmp_path, "c", 1, 9)
