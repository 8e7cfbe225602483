"""Owns where Triton's pieces lie on this machine, and what it needs to start; must not start it.

The pieces come from the ``nvidia-pytriton`` wheel, which is searched and never imported.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from export.contract import UserError
from service.triton_ports import HOST, Ports

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
LIBPYTHON = f"libpython{PYTHON}.so.1.0"
STUB = "triton_python_backend_stub"

SHM = Path("/dev/shm")  # noqa: S108 - where Triton keeps the tensors that its processes exchange
SHM_BYTES_PER_MODEL = 64 << 20

_RUNTIME_MODULES = ("model_repo", "export", "torch", "fbgemm_gpu", "numpy", "pydantic", "safetensors")
"""What a model process imports; where they lie is its PYTHONPATH."""


MALLOC_SETTINGS = {
    "MALLOC_ARENA_MAX": "4",
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}
"""Keep the pages of a freed reply for the next one, in few places: as fast as Triton's own pool of replies, without its
hundreds of megabytes."""


class TritonSetupError(UserError):
    """Something that Triton needs is missing on this machine; the message is one line that says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The Triton of the ``nvidia-pytriton`` wheel."""

    root: Path
    """``pytriton/tritonserver``."""
    libraries: Path
    """``nvidia_pytriton.libs``."""

    @property
    def server(self) -> Path:
        """The ``tritonserver`` binary."""
        return self.root / "bin" / "tritonserver"

    @property
    def python_backend(self) -> Path:
        """Folder of the Python backend, without a stub."""
        return self.root / "backends" / "python"

    @property
    def stub(self) -> Path:
        """The Python backend's model process for the running Python."""
        return self.root / "python_backend_stubs" / PYTHON / STUB


def check_system(*, num_models: int) -> Installation:
    """Find Triton and everything that it needs to serve ``num_models`` models.

    Raises:
        TritonSetupError: Something is missing.
    """
    installation = find_installation()
    _check_stub(installation)
    _check_shared_memory(num_models)
    return installation


def find_installation() -> Installation:
    """Find the wheel's Triton, without importing the wheel.

    Raises:
        TritonSetupError: The wheel is not installed, or has no stub for this Python.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise TritonSetupError(
            "no Triton here: the package nvidia-pytriton is not installed; `pip install nvidia-pytriton==0.7.0`, "
            "or name running servers with --shards HOST:PORT,…"
        )
    package = Path(next(iter(spec.submodule_search_locations)))
    installation = Installation(root=package / "tritonserver", libraries=package.parent / "nvidia_pytriton.libs")
    for path in (installation.server, installation.python_backend, installation.libraries):
        if not path.exists():
            raise TritonSetupError(f"{path} is missing: `pip install --force-reinstall nvidia-pytriton==0.7.0`")
    if not installation.stub.is_file():
        stubs = sorted(path.name for path in installation.stub.parent.parent.glob("*"))
        raise TritonSetupError(f"Triton's Python backend has no stub for Python {PYTHON}; it has them for {stubs}")
    return installation


def build_backends(installation: Installation, directory: Path) -> None:
    """Put together a backend directory whose Python backend runs this Python."""
    backend = directory / "python"
    backend.mkdir(parents=True)
    for path in installation.python_backend.iterdir():
        if path.is_file():
            shutil.copy2(path, backend)
    shutil.copy2(installation.stub, backend)


def server_command(
    installation: Installation,
    repo: Path,
    backends: Path,
    ports: Ports,
    *,
    shm_prefix: str,
    grace_s: float,
    stub_timeout_s: float,
) -> list[str]:
    """A server that loads nothing by itself and names its shared memory by ``shm_prefix``, which is its id, too."""
    return [
        str(installation.server),
        f"--id={shm_prefix}",
        f"--model-repository={repo}",
        # It would keep its last 8 replies, tens of megabytes each; glibc keeps the pages instead, see MALLOC_SETTINGS.
        "--grpc-infer-allocation-pool-size=0",
        f"--backend-directory={backends}",
        "--model-control-mode=explicit",
        "--disable-auto-complete-config",  # would start every model process once more, to ask it for its config
        f"--exit-timeout-secs={max(1, int(grace_s))}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        f"--backend-config=python,stub-timeout-seconds={max(1, int(stub_timeout_s))}",
        "--allow-http=false",
        f"--grpc-address={HOST}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-address={HOST}",
        f"--metrics-port={ports.metrics}",
    ]


def server_environment(installation: Installation, environ: Mapping[str, str], *, num_models: int) -> dict[str, str]:
    """Environment of the server and its model processes: theirs is inherited from the server."""
    libraries = [str(installation.libraries), *_libpython_directory(), environ.get("LD_LIBRARY_PATH", "")]
    modules = [*_module_directories(), environ.get("PYTHONPATH", "")]
    threads = max(1, len(os.sched_getaffinity(0)) // max(1, num_models))
    return {
        "OMP_NUM_THREADS": str(threads),
        **MALLOC_SETTINGS,
        **environ,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PYTHONPATH": os.pathsep.join(filter(None, modules)),
    }


def _module_directories() -> list[str]:
    """Directories that the runtime's modules are imported from: site-packages, and the checkout of an editable install."""
    directories: dict[str, None] = {}
    for name in _RUNTIME_MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise TritonSetupError(
                f"no module {name} for Triton's model processes: install kjtserve with its 'cpu' or 'gpu' extra"
            )
        directories[str(Path(next(iter(spec.submodule_search_locations))).parent)] = None
    return list(directories)


def _libpython_directory() -> list[str]:
    """Where the running Python keeps its shared library, if it has one; preferred to the system's."""
    for directory in (sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib"):
        if directory and (Path(directory) / LIBPYTHON).is_file():
            return [str(directory)]
    return []


def _check_stub(installation: Installation) -> None:
    """Run the stub without arguments: it says how it wants to be called, or the loader says what it lacks."""
    libraries = os.pathsep.join([str(installation.libraries), *_libpython_directory()])
    done = subprocess.run(  # noqa: S603 - the wheel's own binary
        [installation.stub], env={"LD_LIBRARY_PATH": libraries}, capture_output=True, text=True, check=False, timeout=30
    )
    if done.returncode != 127:
        return
    if LIBPYTHON in done.stderr:
        raise TritonSetupError(
            f"Triton's Python backend needs {LIBPYTHON}: `apt-get install libpython{PYTHON}` (Debian, Ubuntu), "
            "or use a Python that was built with --enable-shared"
        )
    raise TritonSetupError(f"Triton's Python backend does not start: {done.stderr.strip()}")


def _check_shared_memory(num_models: int) -> None:
    needed = num_models * SHM_BYTES_PER_MODEL
    free = shutil.disk_usage(SHM).free if SHM.is_dir() else 0
    if free < needed:
        raise TritonSetupError(
            f"{SHM} has {free >> 20} MB free, {num_models} shards need {needed >> 20} MB: start the container with "
            f"--shm-size={max(256, 2 * needed >> 20)}m, or `mount -o remount,size=… {SHM}`"
        )
