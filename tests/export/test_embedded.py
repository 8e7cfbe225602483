"""A program with its state inside reaches the disk whole, or the export ends with one line."""

import subprocess
import sys
from pathlib import Path

import torch

from export import export_collection
from export.published import check_files
from tests.modules import plain_collection

TOO_LARGE = """
import resource, sys
from pathlib import Path
from export import export_collection
from export.errors import ExportError
from tests.modules import plain_collection
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    export_collection(plain_collection({"user": 200_000}), Path(sys.argv[1]), name="c", runtime="pytorch")
except ExportError as exc:
    print(exc)
"""


def test_a_file_that_the_disk_does_not_take_ends_the_export_with_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TOO_LARGE, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("/shard_0/model.pt: File too large; nothing was published\n")
    assert done.stdout.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["c", ".lock"]


def test_what_is_written_is_what_the_manifest_lists(tmp_path):
    manifest = export_collection(plain_collection({"user": 10}), tmp_path, name="c", runtime="pytorch")
    check_files(tmp_path, manifest, lambda *_: None)
    program = torch.jit.load(tmp_path / "c" / "1" / "shard_0" / "model.pt")
    rows, row_ids, hits = program(torch.tensor([3, 99]), torch.tensor([2]), torch.tensor([1]))
    assert (row_ids.tolist(), hits.tolist(), rows[1].tolist()) == ([3, -1], [True, False], [0.0] * 4)
