"""A training loop that publishes as it goes: exact versions, and steps that are hardly held up."""

import logging

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from export import DeltaPublisher, export_delta, verify_version
from export.contract import Kind, read_manifest, versions
from export.errors import ExportError
from export.publish import lock_collection
from tests.export.reader import expected, served
from tests.modules import managed_collection, map_of, plain_collection, untrained_collection
from tests.training import Loop

FOREVER = 1e9


@pytest.fixture
def module():
    return untrained_collection({"user": 12, "item": 20}, eviction_interval=1)


def answers_as(repo, module, manifest, ids):
    found = served(repo, manifest, {"user": ids, "item": ids})
    return all(found[table] == expected(module, table, ids) for table in ("user", "item"))


def all_ids(module, seen):
    for table in ("user", "item"):
        seen += [id_ for id_ in map_of(module, table) if id_ not in seen]
    return seen


@pytest.mark.parametrize("row_dtype", ["fp32", "fp16", "int8"])
def test_every_version_is_the_module_as_it_was_at_its_step(tmp_path, module, row_dtype):
    loop = Loop(module)
    publisher = DeltaPublisher(module, tmp_path, name="c", every=FOREVER, num_shards=2, row_dtype=row_dtype)
    seen, kinds = [], []
    for step in range(12):
        loop.step()
        publisher.step()
        publisher.publish(wait=True)
        manifest = publisher.published
        kinds.append(manifest.kind)
        verify_version(tmp_path, "c", module, manifest.version)
        if row_dtype == "fp32":
            assert answers_as(tmp_path, module, manifest, all_ids(module, seen))
        assert manifest.version == step + 2
    publisher.close()
    assert loop.reset_rows > 50
    assert Kind.DELTA in kinds, "an overlay that has grown makes a base"
    assert Kind.BASE in kinds


def test_a_delta_of_touched_rows_is_the_delta_of_all_rows(tmp_path, module):
    loop = Loop(module)
    publisher = DeltaPublisher(module, tmp_path, name="c", every=FOREVER, max_overlay=FOREVER)
    for _ in range(4):
        loop.step()
        publisher.step()
    publisher.publish(wait=True)
    whole = export_delta(module, tmp_path, name="c")
    assert whole.kind is publisher.published.kind is Kind.DELTA
    assert [shard.tables for shard in whole.shards] == [
        shard.model_copy(
            update={"tables": tuple(entry.model_copy(update={"evicted": 0}) for entry in shard.tables)}
        ).tables
        for shard in publisher.published.shards
    ]
    publisher.close()


def test_bases_come_at_their_own_pace_and_old_versions_go(tmp_path, module):
    loop = Loop(module)
    publisher = DeltaPublisher(module, tmp_path, name="c", every=0.0, base_every=0.0, keep=2)
    for _ in range(4):
        loop.step()
        publisher.step()
        publisher.join()
        assert publisher.failure is None
    assert versions(tmp_path, "c") == [4, 5]
    assert read_manifest(tmp_path, "c", 5).kind is Kind.BASE
    assert sorted(path.name for path in (tmp_path / "c_shard_0").iterdir()) == ["4", "5", "config.pbtxt"]
    assert verify_version(tmp_path, "c", module).version == 5
    publisher.close()


def test_the_base_of_a_delta_is_kept(tmp_path, module):
    loop = Loop(module)
    publisher = DeltaPublisher(module, tmp_path, name="c", every=0.0, max_overlay=FOREVER, keep=1)
    for _ in range(3):
        loop.step()
        publisher.step()
        publisher.join()
    assert versions(tmp_path, "c") == [1, 4]
    publisher.close()


def test_a_version_is_due_by_the_clock_alone(tmp_path, module):
    loop = Loop(module)
    publisher = DeltaPublisher(module, tmp_path, name="c", every=FOREVER)
    for _ in range(3):
        loop.step()
        publisher.step()
    publisher.join()
    assert versions(tmp_path, "c") == [1]
    publisher.close()


def test_a_row_that_changes_unseen_is_caught_and_published_with_all_rows(tmp_path):
    module = plain_collection({"t": 40})
    publisher = DeltaPublisher(module, tmp_path, name="c", every=FOREVER)
    everything = DeltaPublisher(module, tmp_path, name="d", every=FOREVER, rows="all")
    with torch.no_grad():
        module.embeddings["t"].weight *= 0.9  # weight decay
    with pytest.raises(ExportError, match=r"table t: row \d+ changed since the base, .* publish with rows='all'"):
        publisher.publish(wait=True)
    assert versions(tmp_path, "c") == [1]
    everything.publish(wait=True)
    assert verify_version(tmp_path, "d", module).version == 2
    publisher.close()
    everything.close()


def test_lookups_of_a_plain_collection_are_noted(tmp_path):
    module = plain_collection({"t": 40})
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    publisher = DeltaPublisher(module, tmp_path, name="c", every=FOREVER, num_shards=3)
    ids = torch.tensor([3, 3, 39])
    module(KeyedJaggedTensor(keys=["t"], values=ids, lengths=torch.tensor([3])))["t"].values().sum().backward()
    optimizer.step()
    publisher.step()
    publisher.publish(wait=True)
    assert sum(entry.overlay_rows for shard in publisher.published.shards for entry in shard.tables) == 2
    assert verify_version(tmp_path, "c", module).version == 2
    publisher.close()


def test_what_an_evaluation_looks_up_is_not_noted(tmp_path):
    module = plain_collection({"t": 40})
    publisher = DeltaPublisher(module, tmp_path, name="c", every=FOREVER)
    module.eval()(KeyedJaggedTensor(keys=["t"], values=torch.tensor([3]), lengths=torch.tensor([1])))
    assert not publisher._compact("t").numel()
    publisher.close()


def test_evictions_that_nobody_consumed_are_told_and_training_goes_on(tmp_path, module, caplog):
    loop = Loop(module)
    publisher = DeltaPublisher(module, tmp_path, name="c", every=0.0)
    loop.hook.remove()
    ids, lengths = loop.draw(60), torch.ones(60, dtype=torch.int64)
    module._managed_collision_collection(KeyedJaggedTensor(keys=["user", "item"], values=ids, lengths=lengths))
    with caplog.at_level(logging.ERROR):
        publisher.step()
        publisher.join()
    assert isinstance(publisher.failure, ExportError)
    assert "call evict()" in caplog.text
    assert versions(tmp_path, "c") == [1]
    publisher.step(module._managed_collision_collection.evict())
    publisher.join()
    assert publisher.failure is None
    assert verify_version(tmp_path, "c", module).version == 2
    publisher.close()


def test_a_base_that_was_not_published_comes_with_the_next_version(tmp_path, module):
    loop = Loop(module)
    publisher = DeltaPublisher(module, tmp_path, name="c", every=FOREVER, base_every=0.0)
    loop.step()
    publisher.step()
    with lock_collection(tmp_path, "c"), pytest.raises(ExportError, match="another export of 'c' is running"):
        publisher.publish(wait=True)
    publisher._base_every = None
    publisher.publish(wait=True)
    assert publisher.published.kind is Kind.DELTA
    assert verify_version(tmp_path, "c", module).version == 2
    publisher.close()


def test_a_module_that_was_trained_before_is_published_whole(tmp_path):
    module = managed_collection()
    publisher = DeltaPublisher(module, tmp_path, name="c", every=FOREVER)
    assert verify_version(tmp_path, "c", module).version == 1
    publisher.close()
    assert not module._managed_collision_collection._managed_collision_modules["user"]._forward_hooks


@pytest.mark.parametrize(("options", "words"), [({"rows": "some"}, "rows 'some'"), ({"keep": 0}, "keep 0")])
def test_a_wrong_option_is_named(tmp_path, module, options, words):
    with pytest.raises(ExportError, match=words):
        DeltaPublisher(module, tmp_path, name="c", **options)


def test_a_loop_may_use_its_input_buffer_again(tmp_path):
    module = plain_collection({"t": 400})
    module.train()
    publisher = DeltaPublisher(module, tmp_path, name="c", every=FOREVER)
    ids = torch.arange(4)
    for first in (0, 10):
        ids.copy_(torch.arange(first, first + 4))
        module(features=KeyedJaggedTensor(keys=["t"], values=ids, lengths=torch.tensor([4])))
        with torch.no_grad():
            module.embeddings["t"].weight[ids] += 1
    publisher.publish(wait=True)
    assert sum(entry.overlay_rows for shard in publisher.published.shards for entry in shard.tables) == 8
    assert verify_version(tmp_path, "c", module).version == 2
    publisher.close()


def test_a_prune_that_fails_leaves_the_version_published(tmp_path, monkeypatch, caplog):
    module = plain_collection({"t": 40})
    publisher = DeltaPublisher(module, tmp_path, name="c", every=FOREVER)

    def fail(*_):
        raise ExportError("the disk is read-only")

    monkeypatch.setattr("export.publisher.prune_versions", fail)
    publisher.publish(wait=True)
    assert publisher.failure is None
    assert "old versions were not removed" in caplog.text
    assert versions(tmp_path, "c") == [1, 2]
    publisher.close()
