"""A version appears whole or not at all, and Triton's side of the repository follows."""

import errno
import fcntl
import re
import subprocess
import sys

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

import export.building
from export import export_collection, verify_version
from export.contract import INT64_MAX, publishing, versions
from export.errors import ExportError
from export.publish import lock_collection
from tests.modules import managed_collection, plain_collection


def tree(root):
    """Every path with what is in it; the lock is nobody's business."""
    return {
        str(path.relative_to(root)): path.readlink()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(root.rglob("*"))
        if path.name != ".lock"
    }


def test_the_layout_is_tritons(tmp_path):
    manifest = export_collection(managed_collection(), tmp_path, name="clicks", num_shards=2)
    for shard in manifest.shards:
        link = tmp_path / shard.model / "1"
        assert str(link.readlink()) == f"../clicks/1/shard_{shard.index}"
        held = {path.name for path in link.iterdir()}
        assert held == {"model.py", "shard.pt2", "model.pt", "state.safetensors", "probes.safetensors", "__pycache__"}
        assert (link / "__pycache__").read_bytes() == b""
    listed = {file.path for file in manifest.files}
    assert listed == {
        str(path.relative_to(tmp_path / "clicks" / "1"))
        for path in (tmp_path / "clicks" / "1").rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clicks", "clicks_shard_0", "clicks_shard_1"]
    assert sorted(path.name for path in (tmp_path / "clicks").iterdir()) == [".lock", "1"]


def test_the_configuration_is_the_templates_with_the_models_name(tmp_path):
    export_collection(plain_collection(), tmp_path, name="clicks", num_shards=2)
    config = text_format.Parse(
        (tmp_path / "clicks_shard_1" / "config.pbtxt").read_text(), model_config_pb2.ModelConfig()
    )
    assert config.name == "clicks_shard_1"
    assert (config.backend, config.max_batch_size) == ("python", 0)
    assert [tensor.name for tensor in config.input] == ["ids", "table_lengths", "version"]
    assert [tensor.name for tensor in config.output] == ["embeddings", "row_ids", "hits"]
    assert config.version_policy.latest.num_versions == 2


def test_a_configuration_that_has_not_changed_is_not_touched(tmp_path):
    export_collection(plain_collection(), tmp_path, name="c")
    config = tmp_path / "c_shard_0" / "config.pbtxt"
    before = config.stat().st_ino, config.stat().st_mtime_ns
    export_collection(plain_collection(), tmp_path, name="c")
    assert (config.stat().st_ino, config.stat().st_mtime_ns) == before


def test_a_later_version_may_have_another_number_of_shards(tmp_path):
    export_collection(plain_collection(), tmp_path, name="c", num_shards=3)
    export_collection(plain_collection(), tmp_path, name="c", num_shards=1)
    assert sorted(path.name for path in (tmp_path / "c_shard_0").iterdir()) == ["1", "2", "config.pbtxt"]
    assert sorted(path.name for path in (tmp_path / "c_shard_2").iterdir()) == ["1", "config.pbtxt"]
    for version in (1, 2):
        verify_version(tmp_path, "c", plain_collection(), version)


@pytest.mark.parametrize("with_version", [True, False])
def test_a_publication_that_fails_half_way_leaves_nothing_behind(tmp_path, with_version):
    if with_version:
        export_collection(plain_collection(), tmp_path, name="c", num_shards=1)
        (tmp_path / "c_shard_0" / "config.pbtxt").write_text("# an older template's\n")
    (tmp_path / "c_shard_2").write_text("a file where shard 2's directory belongs")
    (tmp_path / "c").mkdir(exist_ok=True)
    before = tree(tmp_path)
    with pytest.raises(ExportError, match=r"c_shard_2: File exists$"):
        export_collection(plain_collection(), tmp_path, name="c", num_shards=3)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "step", ["write_version", "describe_version", "check_loaded", "write_probes", "publish", "render_config"]
)
def test_whatever_fails_before_the_rename_publishes_nothing(tmp_path, monkeypatch, step):
    export_collection(plain_collection(), tmp_path, name="c")
    before = tree(tmp_path)

    def fail(*_args, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(export.building, step, fail)
        with pytest.raises(KeyboardInterrupt):
            export_collection(plain_collection(), tmp_path, name="c")
    assert tree(tmp_path) == before
    assert export_collection(plain_collection(), tmp_path, name="c").version == 2


def test_what_a_killed_export_left_is_cleared_by_the_next(tmp_path):
    export_collection(plain_collection(), tmp_path, name="c")
    before = tree(tmp_path)
    stale = tmp_path / "c" / ".staging-2-999999" / "shard_0"
    stale.mkdir(parents=True)
    (stale / "state.safetensors").write_bytes(b"half")
    (tmp_path / "c_shard_0" / "2").symlink_to("../c/2/shard_0")
    with lock_collection(tmp_path, "c"):
        assert tree(tmp_path) == before


def test_links_of_a_collection_with_a_longer_name_are_left_alone(tmp_path):
    """The other exporter may be between its links and its rename."""
    links = [tmp_path / model / "1" for model in ("clicks_shard_x_shard_0", "clicksXshard_0", "clicks_shard_0_shard_1")]
    for link in links:
        link.parent.mkdir()
        link.symlink_to("../elsewhere/1/shard_0")
    with lock_collection(tmp_path, "clicks"):
        assert all(link.is_symlink() for link in links)


KILLED = """
import os, signal, sys
from pathlib import Path
from export import export_collection
from tests.modules import plain_collection
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
export_collection(plain_collection(), sys.argv[1], name="c", num_shards=2)
"""


def test_an_export_killed_before_its_rename_has_published_nothing(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, capture_output=True)
    assert killed.returncode == -9, killed.stderr.decode()
    assert versions(tmp_path, "c") == []
    assert export_collection(plain_collection(), tmp_path, name="c", num_shards=1).version == 1
    assert [path.name for path in (tmp_path / "c").iterdir() if path.name != ".lock"] == ["1"]
    assert not (tmp_path / "c_shard_1" / "1").is_symlink()


def test_two_exports_of_a_collection_do_not_run_at_once(tmp_path):
    with lock_collection(tmp_path, "c"), pytest.raises(ExportError, match="another export of 'c' is running"):
        export_collection(plain_collection(), tmp_path, name="c")
    assert versions(tmp_path, "c") == []
    with lock_collection(tmp_path, "other"):
        assert export_collection(plain_collection(), tmp_path, name="c").version == 1


def test_the_lock_is_held_by_the_system_so_that_no_crash_keeps_it(tmp_path):
    with lock_collection(tmp_path, "c"), (tmp_path / "c" / ".lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_directory_that_is_no_version_is_not_overwritten(tmp_path):
    (tmp_path / "c" / "3").mkdir(parents=True)
    with pytest.raises(ExportError, match=re.escape("version 3 of 'c' exists")):
        export_collection(plain_collection(), tmp_path, name="c", version=3)
    assert export_collection(plain_collection(), tmp_path, name="c").version == 4


@pytest.mark.parametrize("version", [0, -1, INT64_MAX + 1, True, 1.5, "3"])
def test_a_version_that_is_no_number_of_one_is_refused(tmp_path, version):
    with pytest.raises(ExportError, match=re.escape(f"version {version!r}: use a whole number from 1 to {INT64_MAX}")):
        export_collection(plain_collection(), tmp_path, name="c", version=version)


def test_no_version_follows_the_largest_number(tmp_path):
    export_collection(plain_collection(), tmp_path, name="c", version=INT64_MAX)
    with pytest.raises(ExportError, match=f"version {INT64_MAX} of 'c' leaves no number above it; give a free one"):
        export_collection(plain_collection(), tmp_path, name="c")
    with pytest.raises(ExportError, match="exists and versions are immutable; use a number that is free"):
        export_collection(plain_collection(), tmp_path, name="c", version=INT64_MAX)
    assert export_collection(plain_collection(), tmp_path, name="c", version=7).version == 7


def test_a_version_that_the_disk_did_not_confirm_is_said_to_be_published(tmp_path, monkeypatch):
    sync = publishing._sync

    def fail(directory):
        if versions(tmp_path, "c"):
            raise OSError(errno.EIO, "Input/output error", str(directory))
        sync(directory)

    monkeypatch.setattr(publishing, "_sync", fail)
    with pytest.raises(ExportError, match="version 1 is published, but may not survive a power loss: Input/output"):
        export_collection(plain_collection(), tmp_path, name="c")
    assert versions(tmp_path, "c") == [1]
