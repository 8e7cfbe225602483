"""The Triton that `kjtserve serve` starts, for real: a tiny model whose answer is its own process id."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc.aio as triton_grpc
from tritonclient.utils import InferenceServerException

from export.contract import RepositoryError
from service import triton as triton_module
from service import triton_ports
from service.triton import TritonServer
from service.triton_control import TritonCallError, read_index
from service.triton_log import TritonStartError

pytestmark = pytest.mark.e2e

CONFIG = """
name: "%s" backend: "python" max_batch_size: 0
input { name: "x" data_type: TYPE_INT64 dims: [-1] }
output { name: "pid" data_type: TYPE_INT64 dims: [1] }
instance_group { kind: KIND_CPU count: 1 }
version_policy { latest { num_versions: 2 } }
"""
MODEL = """
import os, sys
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        pid = np.array([os.getpid()], dtype=np.int64)
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("pid", pid)]) for _ in requests]
"""
DEADLINE_S = 30.0
HELD = {"one": [1, 2], "two": [1]}


def write_model(repo: Path, name: str, *versions: int, source: str = MODEL) -> None:
    for version in versions:
        directory = repo / name / str(version)
        directory.mkdir(parents=True)
        (directory / "model.py").write_text(source)
        (directory / "__pycache__").touch()  # as the exporter does, or bytecode makes a version look changed
    (repo / name / "config.pbtxt").write_text(CONFIG % name)


async def ready_versions(server: TritonServer, model: str) -> list[str]:
    return sorted(
        state.version for state in await read_index(server.grpc_address) if state.model == model and state.ready
    )


@pytest.fixture
def repo(tmp_path) -> Path:
    write_model(tmp_path / "repo", "one", 1, 2)
    write_model(tmp_path / "repo", "two", 1)
    return tmp_path / "repo"


@contextlib.asynccontextmanager
async def started(server: TritonServer, *, watch: bool):
    """A server that is up; afterwards nothing of it may be left."""
    processes: list[psutil.Process] = []
    watching = None
    try:
        await server.start()
        if watch:
            watching = asyncio.create_task(server.watch())
        yield server
        processes = psutil.Process(server._guard.pid).children(recursive=True) if server.running else []
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await server.stop()
    assert psutil.wait_procs(processes, timeout=DEADLINE_S)[1] == []
    assert not shm_files(server.shm_prefix)
    assert not server._directory.exists()


async def ask(server: TritonServer, model: str, version: int = 1) -> int:
    """The process id of a model's process."""
    async with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        x = triton_grpc.InferInput("x", [0], "INT64")
        x._raw_content = b""
        result = await client.infer(model, [x], model_version=str(version), client_timeout=5)
    return int(result.as_numpy("pid")[0])


async def ask_until_answered(server: TritonServer, model: str, version: int = 1) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return await ask(server, model, version)
        except InferenceServerException:
            assert time.monotonic() < deadline, f"{model} version {version} did not come back"
            await asyncio.sleep(0.05)


def shm_files(prefix: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"{prefix}*")]


def read_page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        return response.read().decode()


async def test_a_server_starts_answers_shows_metrics_and_leaves_nothing(repo):
    async with started(TritonServer(repo, HELD), watch=False) as server:
        pids = {await ask(server, "one", 1), await ask(server, "one", 2), await ask(server, "two", 1)}
        assert len(pids) == 3
        assert shm_files(server.shm_prefix)
        counted = 'nv_inference_request_success{model="two",version="1"} 1'
        async with asyncio.timeout(10):  # Triton counts a request after it has answered it
            while counted not in await asyncio.to_thread(read_page, server.metrics_url):
                await asyncio.sleep(0.02)
        assert server.log_path.stat().st_size > 0
    assert not server.running


async def test_repair_brings_back_the_dead_process_and_leaves_the_others_alone(repo):
    async with started(TritonServer(repo, HELD), watch=False) as server:
        before = [await ask(server, "one", 1), await ask(server, "one", 2), await ask(server, "two", 1)]
        os.kill(before[0], signal.SIGKILL)
        with pytest.raises(InferenceServerException, match="is not healthy"):
            await ask(server, "one", 1)
        await asyncio.gather(server.repair("one"), server.repair("one"))
        after = [await ask(server, "one", 1), await ask(server, "one", 2), await ask(server, "two", 1)]
        assert after[0] != before[0]
        assert after[1:] == before[1:]


async def test_repair_loads_anew_where_files_cannot_be_touched(repo, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only file system")

    async with started(TritonServer(repo, ["two"]), watch=False) as server:
        pid = await ask(server, "two")
        monkeypatch.setattr("service.triton_repair.os.utime", refuse)
        os.kill(pid, signal.SIGKILL)
        await server.repair("two")
        assert await ask(server, "two") != pid


async def test_watch_repairs_models_and_restarts_the_server_on_the_same_ports(repo, tmp_path):
    log_path = tmp_path / "triton.log"
    async with started(TritonServer(repo, HELD, log_path=log_path), watch=True) as server:
        address, metrics_url, first_prefix = server.grpc_address, server.metrics_url, server.shm_prefix
        pid = await ask(server, "two")
        os.kill(pid, signal.SIGKILL)
        assert await ask_until_answered(server, "two") != pid

        [triton] = psutil.Process(server._guard.pid).children()
        models = triton.children()
        triton.kill()
        assert psutil.wait_procs(models, timeout=DEADLINE_S)[1] == [], "model processes outlived their server"
        for model, version in (("one", 1), ("one", 2), ("two", 1)):
            await ask_until_answered(server, model, version)
        assert (server.grpc_address, server.metrics_url) == (address, metrics_url)
        assert not shm_files(first_prefix)


async def test_a_model_that_does_not_load_fails_the_start_with_its_reason(repo):
    write_model(repo, "bad", 1, source="raise ValueError('the state is truncated')")
    server = TritonServer(repo, ["one", "bad"])
    with pytest.raises(TritonStartError) as failure:
        await server.start()
    assert str(failure.value) == "Triton did not load bad: version 1: Internal: ValueError: the state is truncated"
    assert "failed to load 'bad'" in failure.value.log_tail
    assert not server.running
    assert not shm_files(server.shm_prefix)
    await server.stop()
    assert not server._directory.exists()


async def test_a_new_version_that_does_not_load_leaves_the_old_one_serving(repo):
    write_model(repo, "half", 1)
    async with started(TritonServer(repo, ["half"]), watch=False) as server:
        pid = await ask(server, "half", 1)
        write_model(repo, "half", 2, source="raise ValueError('broken')")
        with pytest.raises(TritonCallError, match=r"^version 2: Internal: ValueError: broken$"):
            await server.hold("half", [1, 2])
        assert await ask(server, "half", 1) == pid
        with pytest.raises(TritonCallError, match=r"^version 2: Internal: ValueError: broken$"):
            await server.hold("half", [2])
        assert await ask(server, "half", 1) == pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(InferenceServerException, match="is not healthy"):
            await ask(server, "half")
        await server.repair("half")
        assert await ask(server, "half", 1) != pid


async def test_the_held_version_comes_back_though_two_newer_ones_were_published(repo):
    async with started(TritonServer(repo, {"two": [1]}), watch=True) as server:
        pid = await ask(server, "two")
        write_model(repo, "two", 2, 3)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(InferenceServerException, match="is not healthy"):
            await ask(server, "two")
        await server.repair("two")
        repaired = await ask(server, "two")
        assert repaired != pid
        assert await ready_versions(server, "two") == ["1"]

        [triton] = psutil.Process(server._guard.pid).children()
        triton.kill()
        triton.wait()
        assert await ask_until_answered(server, "two") != repaired
        assert await ready_versions(server, "two") == ["1"]


async def test_versions_are_added_and_dropped_without_touching_the_others(repo):
    async with started(TritonServer(repo, ["one"]), watch=False) as server:
        newest = await ask(server, "one", 2)
        assert await ready_versions(server, "one") == ["2"]
        await server.hold("one", [1, 2])
        assert await ask(server, "one", 1) != newest
        assert await ask(server, "one", 2) == newest
        await server.hold("one", [2])
        assert await ready_versions(server, "one") == ["2"]
        assert await ask(server, "one", 2) == newest


async def test_a_restart_serves_the_models_that_load_and_tries_the_other_again(repo):
    async with started(TritonServer(repo, HELD), watch=True) as server:
        source = repo / "two" / "1" / "model.py"
        source.write_text("raise ValueError('broken since')")
        [triton] = psutil.Process(server._guard.pid).children()
        triton.kill()
        triton.wait()
        await ask_until_answered(server, "one", 2)
        assert await ready_versions(server, "two") == []
        source.write_text(MODEL)
        await ask_until_answered(server, "two")


async def test_models_load_side_by_side(repo):
    source = MODEL.replace(
        "    def execute", "    def initialize(self, args):\n        __import__('time').sleep(1.0)\n    def execute"
    )
    names = [f"slow{n}" for n in range(4)]
    for name in names:
        write_model(repo, name, 1, source=source)
    async with started(TritonServer(repo, names), watch=False) as server:
        began = [(await asyncio.to_thread(started_at, server, await ask(server, name))) for name in names]
        assert max(began) - min(began) < 1.0, "a model's process was started when another one was done"


def started_at(server: TritonServer, pid: int) -> float:
    return psutil.Process(pid).create_time()


async def test_a_restart_that_the_system_refuses_is_tried_again(repo, monkeypatch):
    async with started(TritonServer(repo, {"two": [1]}), watch=True) as server:
        pid = await ask(server, "two")
        refusals = []
        real = asyncio.create_subprocess_exec

        async def refuse_once(*command, **options):
            if refusals:
                return await real(*command, **options)
            refusals.append(command)
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(triton_module.asyncio, "create_subprocess_exec", refuse_once)
        [triton] = psutil.Process(server._guard.pid).children()
        triton.kill()
        triton.wait()
        assert await ask_until_answered(server, "two") != pid
        assert len(refusals) == 1


async def test_a_held_version_that_is_not_there_fails_the_start(repo):
    server = TritonServer(repo, {"one": [1, 9]})
    with pytest.raises(TritonStartError, match=r"did not load one: version 9: not loaded; is it in .*one\?$"):
        await server.start()
    await server.stop()


async def test_a_server_that_ends_while_it_loads_fails_the_start_naming_the_signal(repo):
    write_model(repo, "fatal", 1, source="import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
    server = TritonServer(repo, {"fatal": [1]})
    with pytest.raises(TritonStartError, match="Triton was ended by SIGKILL"):
        await server.start()
    assert not shm_files(server.shm_prefix)
    await server.stop()


async def test_a_model_that_is_not_there_is_named(repo):
    server = TritonServer(repo, ["nope"])
    with pytest.raises(RepositoryError, match="holds no version of a Triton model 'nope'"):
        await server.start()
    await server.stop()


@pytest.mark.parametrize("lost", ["grpc", "metrics"])
async def test_a_port_lost_to_somebody_else_is_replaced(repo, monkeypatch, lost):
    free_ports = triton_ports.free_ports
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        taken = squatter.getsockname()[1]
        tries = []

        def first_try_loses():
            ports = free_ports()
            tries.append(ports)
            if len(tries) > 1:
                return ports
            return triton_ports.Ports(**{"grpc": ports.grpc, "metrics": ports.metrics, lost: taken})

        monkeypatch.setattr(triton_ports, "free_ports", first_try_loses)
        monkeypatch.setattr(triton_ports, "METRICS_TIMEOUT_S", 0.5)
        async with started(TritonServer(repo, ["two"]), watch=False) as server:
            assert len(tries) == 2
            assert await ask(server, "two")


async def test_stop_during_a_start_leaves_nothing(repo):
    server = TritonServer(repo, HELD)
    starting = asyncio.create_task(server.start())
    deadline = time.monotonic() + DEADLINE_S
    while not server.running:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    guard = psutil.Process(server._guard.pid)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await server.stop()
    assert not guard.is_running()
    assert not shm_files(server.shm_prefix)
    await server.stop()


FRONT = """
import asyncio, sys
from pathlib import Path
from service.triton import TritonServer
async def main():
    server = TritonServer(Path(sys.argv[1]), {"one": [1, 2], "two": [1]})
    await server.start()
    print(server._guard.pid, server.shm_prefix, server._directory, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture
def front(repo):
    """A front tier in a process of its own, to be killed."""
    with subprocess.Popen([sys.executable, "-c", FRONT, repo], stdout=subprocess.PIPE, text=True) as process:
        guard, prefix, directory = process.stdout.readline().split()
        yield process, psutil.Process(int(guard)), prefix, Path(directory)
        process.kill()


def test_killing_the_front_tier_ends_triton_and_its_shared_memory(front):
    process, guard, prefix, directory = front
    everything = [guard, *guard.children(recursive=True)]
    assert len(everything) == 5
    process.kill()
    assert psutil.wait_procs(everything, timeout=DEADLINE_S)[1] == []
    assert not shm_files(prefix)
    assert not directory.exists()


async def test_what_a_kill_of_everything_left_is_removed_by_the_next_start(front, repo):
    process, guard, prefix, directory = front
    everything = [process, guard, *guard.children(recursive=True)]
    for each in everything:
        each.kill()
    process.wait()
    psutil.wait_procs(everything[1:], timeout=DEADLINE_S)
    assert shm_files(prefix)
    async with started(TritonServer(repo, ["two"]), watch=False):
        assert not shm_files(prefix)
    directory.rename(repo.parent / "left")
