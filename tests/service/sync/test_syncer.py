"""Versions come whole from wherever they are published, and whatever fails leaves what is there."""

import errno
import os
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest

from export import export_collection, export_delta, verify_version
from export.contract import RepositoryError, read_pin, version_dir, versions, write_pin
from export.contract.publishing import lock_collection
from service.sync import syncer as syncer_module
from service.sync.source import Source
from service.sync.syncer import Syncer
from tests.modules import managed_collection, train


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A repository with base 1, deltas 2 and 3, base 4, and the module as each version answers."""
    repo = tmp_path_factory.mktemp("published")
    module = managed_collection()
    export_collection(module, repo, name="c", num_shards=2)
    for step in range(2):
        train(module, steps=2, seed=step, first_step=12 + 2 * step)
        export_delta(module, repo, name="c")
    export_collection(module, repo, name="c", num_shards=2)
    return repo, module


@pytest.fixture
def repo(published, tmp_path):
    shutil.copytree(published[0], tmp_path / "source", symlinks=True)
    return tmp_path / "source"


@pytest.fixture
def served_over_http(repo):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(repo)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def tree(root):
    return {
        str(path.relative_to(root)): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in sorted(root.rglob("*"))
        if (path.is_symlink() or path.is_file()) and path.name != ".lock"
    }


def test_a_directory_is_brought_byte_for_byte_with_its_links(repo, tmp_path, published):
    done = Syncer(Source(str(repo)), tmp_path / "dest").round()
    assert done.brought == [("c", 1), ("c", 2), ("c", 3), ("c", 4)]
    assert tree(tmp_path / "dest") == tree(repo)
    assert verify_version(tmp_path / "dest", "c", published[1]).version == 4
    again = Syncer(Source(str(repo)), tmp_path / "dest").round()
    assert (again.brought, again.removed, again.failed) == ([], [], [])


def test_what_http_serves_is_brought(served_over_http, repo, tmp_path):
    Syncer(Source(served_over_http), tmp_path / "dest", names=["c"]).round()
    assert tree(tmp_path / "dest") == tree(repo)


def test_an_object_store_that_knows_no_links_is_brought(repo, tmp_path):
    store = fsspec.filesystem("memory")
    for path in (path for path in repo.rglob("*") if path.is_file() and path.name != ".lock"):
        if not any(parent.is_symlink() for parent in path.parents):
            store.pipe(f"/models/{path.relative_to(repo)}", path.read_bytes())
    try:
        Syncer(Source("memory://models"), tmp_path / "dest").round()
        assert tree(tmp_path / "dest") == tree(repo)
    finally:
        store.rm("/models", recursive=True)


def test_one_shard_gets_its_own_files_and_the_probes_of_all(repo, tmp_path):
    Syncer(Source(str(repo)), tmp_path / "dest", shards=[1]).round()
    for version, state in ((1, "state"), (2, "overlay")):
        held = {
            str(path.relative_to(tmp_path / f"dest/c/{version}"))
            for path in (tmp_path / f"dest/c/{version}").rglob("*.safe*")
        }
        assert held == {"shard_0/probes.safetensors", "shard_1/probes.safetensors", f"shard_1/{state}.safetensors"}
    assert sorted(path.name for path in (tmp_path / "dest").iterdir()) == ["c", "c_shard_1"]


def test_a_front_tier_gets_no_state(repo, tmp_path):
    Syncer(Source(str(repo)), tmp_path / "dest", shards=[]).round()
    names = {path.name for path in (tmp_path / "dest").rglob("*") if path.is_file()}
    assert names == {".lock", "manifest.json", "probes.safetensors"}
    assert versions(tmp_path / "dest", "c") == [1, 2, 3, 4]


def test_the_last_few_are_kept_with_their_bases(repo, tmp_path):
    dest = tmp_path / "dest"
    shutil.rmtree(repo / "c" / "4")
    Syncer(Source(str(repo)), dest, keep=1).round()
    assert versions(dest, "c") == [1, 3]
    shutil.rmtree(repo)
    shutil.copytree(tmp_path / "dest", repo, symlinks=True)
    export_collection(managed_collection(), repo, name="c", num_shards=2)
    done = Syncer(Source(str(repo)), dest, keep=1).round()
    assert (done.brought, done.removed) == ([("c", 4)], [("c", 1), ("c", 3)])
    assert sorted(path.name for path in (dest / "c_shard_0").iterdir()) == ["4", "config.pbtxt"]


def test_a_pin_is_mirrored_and_its_version_kept(repo, tmp_path):
    write_pin(repo, "c", 2)
    Syncer(Source(str(repo)), tmp_path / "dest", keep=1).round()
    assert versions(tmp_path / "dest", "c") == [1, 2, 4]
    assert read_pin(tmp_path / "dest", "c") == 2
    write_pin(repo, "c", None)
    Syncer(Source(str(repo)), tmp_path / "dest", keep=1).round()
    assert read_pin(tmp_path / "dest", "c") is None
    assert versions(tmp_path / "dest", "c") == [4]


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped byte": ("3/shard_0/overlay.safetensors", flip, "are not what was exported"),
    "truncated": (
        "3/shard_1/overlay.safetensors",
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        "not what was",
    ),
    "missing shard": ("3/shard_1/overlay.safetensors", lambda path: path.unlink(), "cannot be read: FileNotFoundError"),
    "broken manifest": ("3/manifest.json", lambda path: path.write_text("{"), "not a manifest this kjtserve can read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_on_the_way_is_not_published_and_the_others_are(repo, tmp_path, damage):
    file, harm, words = DAMAGE[damage]
    sound = (repo / "c" / file).read_bytes()
    harm(repo / "c" / file)
    dest = tmp_path / "dest"
    done = Syncer(Source(str(repo)), dest).round()
    assert done.brought == [("c", 1), ("c", 2), ("c", 4)]
    [(collection, version, reason)] = done.failed
    assert (collection, version) == ("c", 3)
    assert words in reason
    assert not list((dest / "c").glob(".staging*"))
    (repo / "c" / file).write_bytes(sound)
    assert Syncer(Source(str(repo)), dest).round().brought == [("c", 3)]
    assert tree(dest) == tree(repo)


def test_a_manifest_in_another_versions_place_is_refused(repo, tmp_path):
    shutil.copy(repo / "c/2/manifest.json", repo / "c/3/manifest.json")
    done = Syncer(Source(str(repo)), tmp_path / "dest").round()
    assert [(version, "says c version 2, its place says c 3" in reason) for _, version, reason in done.failed] == [
        (3, True)
    ]


def test_a_half_written_version_is_none(repo, tmp_path):
    (repo / "c/4/manifest.json").unlink()
    assert Syncer(Source(str(repo)), tmp_path / "dest").round().brought == [("c", 1), ("c", 2), ("c", 3)]


def test_a_full_disk_leaves_what_is_there_and_says_what_to_do(repo, tmp_path, monkeypatch):
    dest = tmp_path / "dest"
    shutil.move(repo / "c/4", tmp_path / "later")
    Syncer(Source(str(repo)), dest).round()
    before = tree(dest)
    shutil.move(tmp_path / "later", repo / "c/4")

    def full(self, path, target, on_bytes):
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    with monkeypatch.context() as patch:
        patch.setattr(syncer_module.Source, "copy", full)
        done = Syncer(Source(str(repo)), dest).round()
    [(_, version, reason)] = done.failed
    assert version == 4
    assert "No space left on device; make room or keep fewer versions (--keep)" in reason
    assert tree(dest) == before
    assert not list((dest / "c").glob(".staging*"))
    assert Syncer(Source(str(repo)), dest).round().brought == [("c", 4)]


def test_two_at_once_do_not_write_over_each_other(repo, tmp_path):
    dest = tmp_path / "dest"
    dest.mkdir()
    with lock_collection(dest, "c"):
        done = Syncer(Source(str(repo)), dest).round()
    assert not done.brought
    assert all("another export of 'c' is running" in reason for _, _, reason in done.failed)
    assert Syncer(Source(str(repo)), dest).round().brought[-1] == ("c", 4)


def test_new_bases_are_loaded_two_at_most(repo, tmp_path):
    told = []
    Syncer(
        Source(str(repo)), tmp_path / "dest", shards=[0], load=lambda model, bases: told.append((model, list(bases)))
    ).round()
    assert told == [("c_shard_0", [1, 4])]


def test_the_base_of_the_pinned_version_stays_loaded_whatever_is_newer(repo, tmp_path):
    for _ in range(2):
        export_collection(managed_collection(), repo, name="c", num_shards=2)
    write_pin(repo, "c", 2)
    told = []

    def load(model, bases):
        told.append((model, list(bases)))

    Syncer(Source(str(repo)), tmp_path / "dest", shards=[0], load=load).round()
    assert told == [("c_shard_0", [1, 6])]


def test_a_pin_is_mirrored_once_its_version_is_here(repo, tmp_path):
    write_pin(repo, "c", 3)
    sound = (repo / "c/3/shard_0/overlay.safetensors").read_bytes()
    flip(repo / "c/3/shard_0/overlay.safetensors")
    Syncer(Source(str(repo)), tmp_path / "dest").round()
    assert read_pin(tmp_path / "dest", "c") is None
    (repo / "c/3/shard_0/overlay.safetensors").write_bytes(sound)
    Syncer(Source(str(repo)), tmp_path / "dest").round()
    assert read_pin(tmp_path / "dest", "c") == 3


def test_a_base_that_does_not_load_is_told(repo, tmp_path):
    def load(model, bases):
        raise RepositoryError("no such Triton")

    done = Syncer(Source(str(repo)), tmp_path / "dest", shards=[0], load=load).round()
    assert done.failed == [("c", 4, "no such Triton")]
    assert version_dir(tmp_path / "dest", "c", 4).is_dir()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nothing://here", "nothing://here: "),
        ("/nowhere/at/all", "no such directory"),
        ("http://127.0.0.1:9/x", "cannot be read"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(tmp_path, url, words):
    with pytest.raises(RepositoryError, match=words):
        Syncer(Source(url), tmp_path / "dest").round()
