"""What a Triton of our own needs on this machine, and what is said when it is missing."""

import importlib.machinery
import importlib.util
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from service import triton_files
from service.triton_files import (
    LIBPYTHON,
    PYTHON,
    Installation,
    TritonSetupError,
    build_backends,
    check_system,
    find_installation,
    server_environment,
)


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A site-packages with a stand-in for the nvidia-pytriton wheel."""
    root = tmp_path / "pytriton" / "tritonserver"
    for path in (root / "bin" / "tritonserver", root / "backends" / "python" / "libtriton_python.so"):
        path.parent.mkdir(parents=True)
        path.touch()
    (root / "backends" / "python" / "triton_python_backend_utils.py").write_text("# utils")
    (tmp_path / "nvidia_pytriton.libs").mkdir()
    write_stub(root, "exit 1")
    real = importlib.util.find_spec

    def find_spec(name, package=None):
        if name != "pytriton":
            return real(name, package)
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path / "pytriton")]
        return spec

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return root


def write_stub(root: Path, body: str) -> None:
    stub = root / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True, exist_ok=True)
    stub.write_text(f"#!/bin/sh\n{body}\n")
    stub.chmod(0o755)


def test_the_installed_wheel_is_found_and_complete():
    installation = check_system(num_models=1)
    assert installation.server.is_file()
    assert os.access(installation.stub, os.X_OK)


def test_a_missing_wheel_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TritonSetupError, match=r"pip install nvidia-pytriton==0\.7\.0"):
        find_installation()


def test_an_incomplete_wheel_is_named(wheel):
    shutil.rmtree(wheel.parent.parent / "nvidia_pytriton.libs")
    with pytest.raises(TritonSetupError, match=r"nvidia_pytriton\.libs is missing: `pip install --force-reinstall"):
        find_installation()


def test_a_python_without_stub_names_those_that_have_one(wheel):
    (wheel / "python_backend_stubs" / PYTHON).rename(wheel / "python_backend_stubs" / "3.8")
    with pytest.raises(TritonSetupError, match=rf"no stub for Python {PYTHON}; it has them for \['3\.8'\]"):
        find_installation()


def test_a_missing_libpython_names_the_debian_package(wheel):
    write_stub(wheel, f"echo 'error while loading shared libraries: {LIBPYTHON}: cannot open' >&2; exit 127")
    with pytest.raises(TritonSetupError, match=f"`apt-get install libpython{PYTHON}`"):
        check_system(num_models=1)


def test_another_missing_library_is_named(wheel):
    write_stub(wheel, "echo 'error while loading shared libraries: libz.so.1: cannot open' >&2; exit 127")
    with pytest.raises(TritonSetupError, match=r"does not start: .*libz\.so\.1"):
        check_system(num_models=1)


@pytest.mark.parametrize(("num_models", "free_mb", "enough"), [(1, 64, True), (1, 63, False), (3, 191, False)])
def test_shared_memory_must_hold_every_model(wheel, monkeypatch, num_models, free_mb, enough):
    monkeypatch.setattr(triton_files.shutil, "disk_usage", lambda _: SimpleNamespace(free=free_mb << 20))
    if enough:
        check_system(num_models=num_models)
        return
    with pytest.raises(
        TritonSetupError, match=rf"/dev/shm has {free_mb} MB free, {num_models} shards need .*--shm-size="
    ):
        check_system(num_models=num_models)


def test_the_backend_folder_holds_the_stub_of_this_python(wheel, tmp_path):
    write_stub(wheel, "exit 7")
    build_backends(find_installation(), tmp_path / "backends")
    names = {path.name for path in (tmp_path / "backends" / "python").iterdir()}
    assert names == {"libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"}
    assert "exit 7" in (tmp_path / "backends" / "python" / "triton_python_backend_stub").read_text()


def test_model_processes_share_the_cpus_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    installation = Installation(root=tmp_path, libraries=tmp_path)
    threads = {models: server_environment(installation, {}, num_models=models) for models in (0, 1, 3, 20)}
    assert {models: env["OMP_NUM_THREADS"] for models, env in threads.items()} == {0: "8", 1: "8", 3: "2", 20: "1"}
    told = server_environment(installation, {"OMP_NUM_THREADS": "5"}, num_models=3)
    assert told["OMP_NUM_THREADS"] == "5"


def test_the_environment_keeps_what_is_there_and_puts_ours_first(tmp_path):
    installation = Installation(root=tmp_path, libraries=tmp_path / "libs")
    environ = {"LD_LIBRARY_PATH": "/theirs", "PYTHONPATH": "/also", "HOME": "/home/me"}
    env = server_environment(installation, environ, num_models=1)
    libraries, modules = env["LD_LIBRARY_PATH"].split(os.pathsep), env["PYTHONPATH"].split(os.pathsep)
    assert (libraries[0], libraries[-1], modules[-1], env["HOME"]) == (
        str(tmp_path / "libs"),
        "/theirs",
        "/also",
        "/home/me",
    )
    for name in ("model_repo", "export", "torch", "numpy"):
        assert str(Path(importlib.util.find_spec(name).origin).parent.parent) in modules
