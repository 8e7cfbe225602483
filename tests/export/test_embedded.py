"""A program with its state inside reaches the disk whole, or the export ends with one line."""

import errno
import io
import os
from pathlib import Path

import pytest
import torch

from export import export_collection
from export.errors import ExportError
from export.published import check_files
from tests.modules import plain_collection


@pytest.mark.parametrize("step", ["write", "fsync"])
def test_a_full_disk_ends_the_export_with_one_line(tmp_path, monkeypatch, step):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class FullDisk(io.BytesIO):
        write = full

    opened = Path.open
    if step == "write":
        monkeypatch.setattr(
            Path,
            "open",
            lambda path, *args, **more: FullDisk() if path.name == "model.pt" else opened(path, *args, **more),
        )
    else:
        monkeypatch.setattr("export.embedded.os.fsync", full)
    with pytest.raises(ExportError, match=r"^[^\n]*No space left on device[^\n]*$"):
        export_collection(plain_collection({"user": 10}), tmp_path, name="c", runtime="pytorch")
    assert [path.name for path in tmp_path.rglob("*")] == ["c", ".lock"]


def test_a_shard_without_tables_is_written_too(tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("{shards: 2, tables: {user: {shard: 0}}}")
    repo = tmp_path / "repo"
    manifest = export_collection(plain_collection({"user": 10}), repo, name="c", plan=plan, runtime="pytorch")
    check_files(repo, manifest, lambda *_: None)


def test_what_is_written_is_what_the_manifest_lists(tmp_path):
    manifest = export_collection(plain_collection({"user": 10}), tmp_path, name="c", runtime="pytorch")
    check_files(tmp_path, manifest, lambda *_: None)
    program = torch.jit.load(tmp_path / "c" / "1" / "shard_0" / "model.pt")
    rows, row_ids, hits = program(torch.tensor([3, 99]), torch.tensor([2]), torch.tensor([1]))
    assert (row_ids.tolist(), hits.tolist(), rows[1].tolist()) == ([3, -1], [True, False], [0.0] * 4)
