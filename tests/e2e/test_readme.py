"""The README's example, run as it is printed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
PROJECT = Path(__file__).parents[2]


def test_the_ten_line_example_works_as_printed(clicks):
    block = re.findall(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)[0]
    assert len([line for line in block.splitlines() if line.strip() and not line.startswith("import")]) <= 10
    script = block.replace("127.0.0.1:8080", clicks[0].http)
    assert script != block
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(3, 4)"), done.stdout


def test_the_curl_line_works_as_printed(clicks):
    (line,) = re.findall(r"^    (curl -s .*)$", (PROJECT / "README.md").read_text(), re.MULTILINE)
    command = line.replace("127.0.0.1:8080", clicks[0].http)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(done.stdout)["embeddings"]["item"] == [[]], done
