"""A set-up that did not install everything is not taken for done; nothing here downloads."""

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.check_lock import find_faults, main, read_pins

ROOT = Path(__file__).parents[2]

FAKE_PYTHON = """#!/bin/sh
case "$*" in
  "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  *"pip install"*requirements/lock.txt) echo "Requirement already satisfied: x"; exit "$PIP_STATUS" ;;
  *check_lock*) exit "$LOCK_STATUS" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose Python only plays installing; `make setup` ends as the statuses say."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "lock.txt").write_text("x==1\n")
    (tmp_path / "pyproject.toml").touch()
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

    def make(*, pip_status=0, lock_status=0):
        environment = {"PATH": os.environ["PATH"], "PIP_STATUS": str(pip_status), "LOCK_STATUS": str(lock_status)}
        command = ["make", f"PYTHON={python}", ".venv/.ready"]
        return subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)

    return make


@pytest.mark.parametrize("statuses", [{"pip_status": 1}, {"lock_status": 1}])
def test_a_set_up_that_failed_is_done_again(tmp_path, checkout, statuses):
    assert checkout(**statuses).returncode != 0
    assert not (tmp_path / ".venv" / ".ready").exists()
    done = checkout()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".venv" / ".ready").exists()


def test_a_second_set_up_has_nothing_to_do(checkout):
    first = checkout()
    assert (first.returncode, "Requirement" in first.stdout) == (0, False)
    again = checkout(pip_status=1)
    assert again.returncode == 0
    assert "up to date" in again.stdout


def test_the_lock_is_held_against_what_is_installed():
    pytest_version = importlib.metadata.version("pytest")
    assert list(find_faults({"pytest": pytest_version, "PyTest": pytest_version})) == []
    assert list(find_faults({"pytest": "0.1", "no-such-package": "2"})) == [
        f"pytest is {pytest_version}, not 0.1",
        "no-such-package 2 is missing",
    ]


@pytest.mark.parametrize(("found", "sound"), [("2.13.0+cpu", True), ("2.13.0", True), ("2.13.1+cpu", False)])
def test_a_local_version_is_the_pinned_one(monkeypatch, found, sound):
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: found)
    assert (list(find_faults({"torch": "2.13.0"})) == []) is sound


def test_this_environment_is_the_locks():
    pins = read_pins((ROOT / "requirements" / "lock.txt").read_text())
    assert len(pins) > 50
    assert list(find_faults(pins)) == []


def test_the_answer_is_one_line(tmp_path):
    lock = tmp_path / "lock.txt"
    lock.write_text("# comment\n\n" + "".join(f"no-such-package-{n}==1\n" for n in range(7)))
    with pytest.raises(
        SystemExit, match=r"lock\.txt: no-such-package-0 1 is missing; .*; and 2 more; run `make setup`"
    ):
        main(lock)
    lock.write_text("torch>=2\n")
    with pytest.raises(SystemExit, match=r"lock\.txt: line 1: 'torch>=2' is not name==version"):
        main(lock)
