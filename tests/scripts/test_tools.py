"""scripts/tools.py gives a name only to what it has checked; nothing here downloads."""

import hashlib
import io
from dataclasses import replace

import pytest

from scripts import tools
from scripts.tools import Tool, ToolError

SCRIPT = b"#!/bin/sh\necho tool v1.2\n"
TOOL = Tool(
    name="tool",
    member="tool/tool",
    sha256=hashlib.sha256(SCRIPT).hexdigest(),
    version_args=("version",),
    version="v1.2",
)


def place(folder, tool=TOOL, content=SCRIPT):
    tools.place(folder, tool, io.BytesIO(content), expect_sha256=tool.sha256)


def test_a_placed_tool_is_present_and_runs(tmp_path):
    assert not tools.present(tmp_path, TOOL)
    place(tmp_path)
    assert tools.present(tmp_path, TOOL)
    assert tools.check_version(tmp_path / "tool", TOOL) == "tool v1.2"


def test_other_bytes_than_the_pinned_ones_are_refused_and_leave_nothing(tmp_path):
    with pytest.raises(ToolError, match=r"tool: SHA-256 [0-9a-f]{64}, pinned"):
        place(tmp_path, content=SCRIPT + b"#")
    assert list(tmp_path.iterdir()) == []


def test_another_version_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(ToolError, match="expected v9"):
        place(tmp_path, tool=replace(TOOL, version="v9"))
    assert list(tmp_path.iterdir()) == []


def test_a_changed_tool_is_fetched_again(tmp_path):
    place(tmp_path)
    (tmp_path / "tool").write_bytes(SCRIPT + b"#")
    assert not tools.present(tmp_path, TOOL)


def test_a_command_that_fails_says_what_to_do():
    with pytest.raises(ToolError, match=r"exited 3: no such thing; try again$"):
        tools.run(["/bin/sh", "-c", "echo first >&2; echo no such thing >&2; exit 3"], hint="try again")


def test_installed_prometheus_is_linked_and_checked(tmp_path, monkeypatch):
    path, bin_dir = tmp_path / "path", tmp_path / "bin"
    path.mkdir()
    for name in ("promtool", "prometheus"):
        (path / name).write_text(f"#!/bin/sh\necho {name}, version 2.0\n")
        (path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:/bin")
    tools.fetch_prometheus(tools.PROMETHEUS, bin_dir)
    assert {item.name: item.resolve() for item in bin_dir.iterdir()} == {
        name: path / name for name in ("promtool", "prometheus")
    }
