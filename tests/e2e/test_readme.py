"""The README's example, run as it is printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from export import export_collection
from tests.e2e.conftest import trained_with_evictions
from tests.e2e.serving import serve

pytestmark = pytest.mark.e2e
PROJECT = Path(__file__).parents[2]


def test_the_ten_line_example_works_as_printed(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip() and not line.startswith("import")]) <= 10
    module, _ = trained_with_evictions({"user": 60, "item": 40}, {"user": ["user"], "item": ["item"]})
    export_collection(module, tmp_path / "repo", name="ratings", num_shards=2)
    with serve(tmp_path / "repo", tmp_path / "log") as serving:
        script = block.replace("127.0.0.1:8080", serving.http)
        assert script != block
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(3, 4)"), done.stdout
