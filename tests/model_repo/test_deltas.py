"""A process answers from deltas on its base: mapped when first asked for, the last few kept, nothing else let in."""

import importlib
import json
import time

import pytest
import torch

from export import export_collection, export_delta
from export.contract import shard_dir, version_dir
from export.contract.layout import MANIFEST_FILE, OVERLAY_FILE
from model_repo.deltas import KEPT, Deltas
from model_repo.errors import NotReady, Unservable, WrongVersion
from model_repo.shard import load_shard
from tests.export.reader import expected, row_bytes
from tests.modules import managed_collection, map_of, train


@pytest.fixture
def module():
    return managed_collection()


@pytest.fixture
def repo(tmp_path, module):
    export_collection(module, tmp_path, name="c")
    return tmp_path


@pytest.fixture
def deltas(repo):
    directory = repo / "c_shard_0" / "1"
    deltas = Deltas(load_shard(directory, "c_shard_0"), directory)
    yield deltas
    deltas.close()


def publish(module, repo, step):
    train(module, steps=2, seed=step, first_step=12 + 2 * step)
    return export_delta(module, repo, name="c").version


def find(deltas, version):
    """Ask again until the version is mapped, as a front tier does."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return deltas.find(version)
        except NotReady:
            assert time.monotonic() < deadline, "it is never mapped"
            time.sleep(0.002)


def answers(deltas, version, ids):
    shard = deltas._shard
    lengths = [len(ids), *[0] * (len(shard.tables) - 1)]
    answer = shard.lookup(find(deltas, version), torch.tensor(ids), torch.tensor(lengths))
    rows = map(row_bytes, answer.embeddings_ND)
    return list(zip(rows, answer.row_ids_N.tolist(), answer.hits_N.tolist(), strict=True))


def test_every_version_answers_as_the_module_did_then(deltas, module, repo):
    before = map_of(module, "user")
    ids = [*before, -1, 5]
    wanted = {1: expected(module, "user", ids)}
    for step in range(2):
        version = publish(module, repo, step)
        ids += [id_ for id_ in map_of(module, "user") if id_ not in ids]
    ids += [id_ for id_ in map_of(module, "user") if id_ not in ids]
    wanted[3] = expected(module, "user", ids)
    assert answers(deltas, version, ids) == wanted[3]
    assert answers(deltas, 1, ids[: len(wanted[1])]) == wanted[1]
    assert set(before) - set(map_of(module, "user")), "nothing was evicted"


def test_the_base_is_mapped_once_whatever_lies_over_it(deltas, module, repo):
    delta = find(deltas, publish(module, repo, 0))
    base = dict(zip(deltas._shard.shard.state, deltas._shard.base.state, strict=True))
    held = dict(zip(delta.shard.state, delta.state, strict=True))
    own = [name for name in held if held[name].data_ptr() != base[name].data_ptr()]
    assert set(own) <= set(delta.shard.overlay)
    assert held["rows"] is base["rows"]


def test_the_last_few_are_kept(deltas, module, repo):
    for step in range(KEPT + 2):
        find(deltas, publish(module, repo, step))
    assert list(deltas._mapped) == list(range(4, 4 + KEPT))
    find(deltas, 2)  # one that was let go of is mapped again
    assert list(deltas._mapped)[-1] == 2


@pytest.mark.parametrize("version", [2, 0, -1, 2**62])
def test_a_version_that_nobody_published_is_the_wrong_one(deltas, version):
    with pytest.raises(WrongVersion, match=f"version: {version}, this process serves 1 and deltas on it"):
        deltas.find(version)


def test_another_base_is_no_delta(deltas, module, repo):
    export_collection(module, repo, name="c")
    with pytest.raises(Unservable, match="version 2 is a base on base 2, this process holds base 1"):
        find(deltas, 2)


def test_a_delta_on_another_base_of_that_number_is_refused(deltas, module, repo):
    version = publish(module, repo, 0)
    path = version_dir(repo, "c", 1) / MANIFEST_FILE
    path.write_text(path.read_text() + "\n")
    with pytest.raises(Unservable, match="was made on another base 1 than the one in"):
        find(deltas, version)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "its SHA-256 differs"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "bytes, the manifest says"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_a_damaged_overlay_is_named_and_taken_once_it_is_put_right(deltas, module, repo, damage, words):
    version = publish(module, repo, 0)
    path = shard_dir(version_dir(repo, "c", version), 0) / OVERLAY_FILE
    sound = path.read_bytes()
    damage(path)
    with pytest.raises(Unservable, match=f"version: 2 cannot be served: .*{words}"):
        find(deltas, version)
    assert deltas.find(1).version == 1
    path.write_bytes(sound)
    assert find(deltas, version).version == version


def test_a_half_written_version_is_the_wrong_one_until_its_manifest_is_there(deltas, module, repo):
    version = publish(module, repo, 0)
    path = version_dir(repo, "c", version) / MANIFEST_FILE
    manifest = path.read_text()
    path.unlink()
    with pytest.raises(WrongVersion):
        deltas.find(version)
    path.write_text(json.dumps(json.loads(manifest)))
    assert find(deltas, version).version == version


@pytest.fixture
def runtime(pb_utils, repo):
    model = importlib.import_module("model_repo.runtime").TritonPythonModel()
    directory = repo / "c_shard_0"
    model.initialize({"model_repository": str(directory), "model_version": "1", "model_name": "c_shard_0"})
    yield model
    model.finalize()


def ask(runtime, make_request, ids, version, **options):
    """One request for ids of the first table, asked again while the version is being mapped."""
    lengths = [len(ids), *[0] * (len(runtime._shard.tables) - 1)]
    deadline = time.monotonic() + 20
    while True:
        [response] = runtime.execute([make_request(ids, lengths, version=(version,), **options)])
        if response.error is None or response.error.code != "UNAVAILABLE":
            return response
        assert time.monotonic() < deadline, "it is never mapped"
        time.sleep(0.002)


def test_outcomes_and_gauges_are_those_of_the_version_that_answers_and_probes_are_not_counted(
    runtime, make_request, pb_utils, module, repo
):
    before = map_of(module, "user")
    for step in range(4):
        version = publish(module, repo, step)
    now = map_of(module, "user")
    gone, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    assert gone
    assert new
    ids = [*gone, *gone, *new, 5]
    assert ask(runtime, make_request, ids, version, id="kjtserve-probe").error is None
    assert ask(runtime, make_request, ids, version).outputs()["hits"].sum() == len(new)
    assert ask(runtime, make_request, [], 1).error is None  # a liveness probe asks the base for nothing
    runtime.finalize()
    page = pb_utils.page
    labels = {"collection": "c", "shard": "0", "table": "user"}
    counted = {
        outcome: page["kjtserve_remap_ids_total", labels | {"outcome": outcome}]
        for outcome in ("hit", "overlay", "unknown", "evicted")
    }
    assert counted == {"hit": 0, "overlay": len(new), "unknown": 1, "evicted": 2 * len(gone)}
    assert page["kjtserve_zch_rows", labels] == len(now)


def test_a_delta_that_cannot_be_mapped_is_told_apart_from_one_that_is_being_mapped(runtime, make_request, module, repo):
    version = publish(module, repo, 0)
    flip(shard_dir(version_dir(repo, "c", version), 0) / OVERLAY_FILE)
    response = ask(runtime, make_request, [5], version)
    assert response.error.code == "UNSUPPORTED"
    assert "cannot be served" in str(response.error)
