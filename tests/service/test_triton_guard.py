"""The process between the front tier and its Triton, with a stand-in for Triton."""

import fcntl
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from service import triton_guard

SHM = Path("/dev/shm")
DEADLINE_S = 20.0

# Makes a region, starts a model process that makes one too, and then does as it is told.
SERVER = """
import pathlib, signal, subprocess, sys, time
prefix, on_term, pid_file = sys.argv[1:]
if on_term == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(f"/dev/shm/{prefix}region").touch()
model = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
pathlib.Path(pid_file).write_text(str(model.pid))
if on_term == "crash":
    sys.exit(3)
time.sleep(600)
"""


@pytest.fixture
def guard(tmp_path):
    """Start a guarded stand-in; `prefix` and `directory` are its shared memory prefix and its directory to remove."""
    processes = []

    def start(on_term: str, grace_s: float = 10.0):
        prefix = f"{triton_guard.PREFIX_START}{secrets.token_hex(6)}_"
        directory = tmp_path / "run"
        directory.mkdir()
        command = [sys.executable, "-I", "-S", triton_guard.__file__, "--shm-prefix", prefix, "--grace-s", str(grace_s)]
        process = subprocess.Popen(
            [
                *command,
                "--remove",
                directory,
                "--",
                sys.executable,
                "-c",
                SERVER,
                prefix,
                on_term,
                tmp_path / "model.pid",
            ],
            stdin=subprocess.PIPE,
        )
        process.prefix, process.directory = prefix, directory
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.stdin.close()
        process.kill()
        process.wait()


def server_and_model(process: subprocess.Popen) -> list[psutil.Process]:
    deadline = time.monotonic() + DEADLINE_S
    while len(family := psutil.Process(process.pid).children(recursive=True)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return family


def left_in_shm(prefix: str) -> list[Path]:
    return list(SHM.glob(f"{prefix}*"))


def test_told_to_stop_it_ends_the_server_and_its_model_processes_and_keeps_the_directory(guard):
    process = guard("polite")
    family = server_and_model(process)
    assert left_in_shm(process.prefix)
    process.stdin.write(b"s")
    process.stdin.flush()
    assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert not [each for each in family if each.is_running()]
    assert not left_in_shm(process.prefix)
    assert process.directory.exists()


def test_a_server_that_does_not_listen_is_killed_after_its_grace(guard):
    process = guard("deaf", grace_s=0.2)
    family = server_and_model(process)
    process.stdin.write(b"s")
    process.stdin.flush()
    assert process.wait(DEADLINE_S) == 128 + signal.SIGKILL
    assert not [each for each in family if each.is_running()]


def test_a_front_tier_that_is_gone_ends_the_server_and_the_directory(guard):
    process = guard("polite")
    family = server_and_model(process)
    process.stdin.close()
    assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert not [each for each in family if each.is_running()]
    assert not left_in_shm(process.prefix)
    assert not process.directory.exists()


def test_a_server_that_ends_by_itself_passes_its_code_on_and_leaves_no_model_process(guard, tmp_path):
    process = guard("crash")
    assert process.wait(DEADLINE_S) == 3
    assert not left_in_shm(process.prefix)
    assert process.directory.exists()
    assert not psutil.pid_exists(int((tmp_path / "model.pid").read_text()))


def test_the_server_dies_with_a_killed_guard(guard):
    process = guard("polite")
    [server, *_] = server_and_model(process)
    model = server.children()
    process.kill()
    process.wait()
    assert psutil.wait_procs([server], DEADLINE_S)[1] == []
    for each in model:
        each.kill()  # Triton's own notice that their server is gone; this stand-in does not


def test_regions_of_the_living_stay_and_those_of_the_dead_go(tmp_path):
    for name in ("kjtserve_00000000dead_", "kjtserve_0000000a11fe_"):
        for suffix in ("lock", "region1", "region2"):
            (tmp_path / f"{name}{suffix}").touch()
    (tmp_path / "somebody_elses").touch()
    with (tmp_path / "kjtserve_0000000a11fe_lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        triton_guard.remove_dead_regions(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "kjtserve_0000000a11fe_lock",
        "kjtserve_0000000a11fe_region1",
        "kjtserve_0000000a11fe_region2",
        "somebody_elses",
    ]


def test_a_claimed_prefix_is_safe_from_the_start_until_the_lock_is_let_go(tmp_path):
    lock = triton_guard.claim_prefix("kjtserve_000000000001_", tmp_path)
    triton_guard.remove_dead_regions(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kjtserve_000000000001_lock"]
    os.close(lock)
    triton_guard.remove_dead_regions(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["kjtserve_*_", "kjtserve_[0-9a-f]00000000001_", "kjtserve_", "kjtserve_0_"])
def test_a_lock_of_a_name_that_no_server_has_removes_nothing(tmp_path, name):
    lock = triton_guard.claim_prefix("kjtserve_000000000001_", tmp_path)
    (tmp_path / "kjtserve_000000000001_region").touch()
    (tmp_path / f"{name}lock").touch()
    triton_guard.remove_dead_regions(tmp_path)
    triton_guard.remove_regions("kjtserve_*_", tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    os.close(lock)
    assert {"kjtserve_000000000001_lock", "kjtserve_000000000001_region"} <= left
