"""``kjtserve serve`` as a process: starting, stopping, and saying in one line what is wrong."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from export import export_collection
from tests.e2e.serving import END_WITH_PARENT, KJTSERVE, command_of, launch, serve, until
from tests.modules import plain_collection

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def repo(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "repo"
    export_collection(plain_collection({"t": 10}), folder, name="small", num_shards=1)
    return folder


def shm_files(serving) -> list[str]:
    """Shared memory of the models of one server; others on this machine have their own prefix."""
    regions = [child.cmdline()[2] for child in serving.children() if "triton_python_backend_stub" in child.cmdline()[0]]
    prefixes = {region.rpartition("_")[0] for region in regions}
    assert prefixes
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(tuple(prefixes))]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_child_and_exits_0(number, repo, tmp_path):
    with serve(repo, tmp_path / "log") as serving:
        children, shared = serving.children(), shm_files(serving)
        assert shared
        serving.process.send_signal(number)
        assert serving.process.wait(30) == 0, serving.log()
        until(lambda: not any(child.is_running() for child in children), 5, "children end")
    assert not [name for name in shared if (Path("/dev/shm") / name).exists()]


def test_a_signal_while_triton_is_coming_up_ends_everything_too(repo, tmp_path):
    with launch(repo, tmp_path / "log") as starting:
        until(lambda: any(c.name() == "tritonserver" for c in starting.children()), 60, "triton starts")
        assert starting.events("triton_starting")[0]["versions"] == {"small": 1}
        children = starting.children()
        starting.process.send_signal(signal.SIGTERM)
        assert starting.process.wait(30) == 0, starting.log()
        until(lambda: not any(child.is_running() for child in children), 5, "children end")


def test_killed_outright_it_leaves_no_process_behind(repo, tmp_path):
    with serve(repo, tmp_path / "log") as serving:
        children, shared = serving.children(), shm_files(serving)
        serving.process.kill()
        serving.process.wait(10)
        until(
            lambda: not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children),
            30,
            "children of a killed server end",
        )
    until(
        lambda: not [name for name in shared if (Path("/dev/shm") / name).exists()], 10, "shared memory is given back"
    )


def test_what_the_tests_start_ends_when_they_are_killed():
    code = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *END_WITH_PARENT, "/bin/sleep", "600"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as parent:  # fmt: skip
        child = psutil.Process(int(parent.stdout.readline()))
        until(lambda: command_of(child)[:1] == ["/bin/sleep"], 30, "the wrapper runs its command")
        parent.kill()
    until(lambda: command_of(child) == [], 10, "the command ends")


def test_with_shards_of_another_server_it_starts_no_triton(repo, tmp_path):
    with serve(repo, tmp_path / "first") as owner:
        triton = owner.triton_metrics  # only to show that the owner has one
        assert triton
        address = next(
            f"127.0.0.1:{argument.partition('=')[2]}"
            for child in owner.children()
            if child.name() == "tritonserver"
            for argument in child.cmdline()
            if argument.startswith("--grpc-port=")
        )
        with serve(repo, tmp_path / "second", "--shards", address) as second:
            assert second.children() == []
            done = subprocess.run(
                [str(KJTSERVE), "lookup", "small", "-f", "t=1,2;3", "--url", second.http_url],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert "known" in done.stdout


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(KJTSERVE), *arguments], capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **env}
    )


def test_a_busy_port_is_said_in_one_line(repo):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", str(repo), "--http-port", str(port), "--shards", "127.0.0.1:1")
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "--http-port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "env", "code", "words"),
    [
        (["serve", "/nowhere"], {}, 1, "no such directory"),
        (["serve"], {}, 2, "REPO"),
        (["serve", "REPO", "--http-port", "99999"], {}, 2, "65535"),
        (["serve", "REPO", "--http-port", "0", "--shards", "a:1,b:2,c:3"], {}, 1, "3 addresses"),
        (["serve", "REPO"], {"KJTSERVE_MAX_IDS": "none"}, 1, "KJTSERVE_MAX_IDS"),
        (["lookup", "small", "-f", "t=1", "--url", "http://127.0.0.1:1"], {}, 1, "kjtserve serve"),
        (["lookup", "small", "-f", "t"], {}, 2, "NAME=1,2"),
        (["serve", "REPO", "--shards", "foo"], {}, 2, "HOST:PORT"),
        (["serve", "REPO"], {"KJTSERVE_HTTP_PORT": "99999"}, 1, "KJTSERVE_HTTP_PORT"),
        (["nothing"], {}, 2, "nothing"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, env, code, words, repo):
    done = run(*[str(repo) if argument == "REPO" else argument for argument in arguments], **env)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        assert len([line for line in done.stderr.splitlines() if not line.startswith(("{", "W"))]) == 1, done.stderr


def test_every_command_teaches():
    top = run("--help")
    assert top.returncode == 0
    for command in ("export", "verify", "inspect", "serve", "lookup", "bench"):
        assert command in top.stdout
        done = run(command, "--help")
        assert done.returncode == 0, done.stderr
        assert "Not available" not in done.stdout
