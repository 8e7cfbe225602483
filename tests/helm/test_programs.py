"""The programs that the chart starts take the arguments that it gives them."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from model_repo import probe
from service.commands import serve
from tests.helm.charts import CASES, TIMEOUT_S
from tests.helm.objects import of_kind, pod_spec


def containers(case, kind):
    return [pod_spec(item)["containers"][0] for item in of_kind(CASES[case].objects(), kind)]


def test_kjtserve_serve_takes_the_front_tiers_arguments():
    (front,) = containers("many_shards", "Deployment")
    assert front["command"] == ["kjtserve"]
    assert front["args"][0] == "serve"
    app = typer.Typer()
    app.command()(serve)
    params = get_command(app).make_context("serve", front["args"][1:]).params
    assert params["repo"] == Path("/models")
    assert (params["http_port"], params["grpc_port"]) == (8080, 8081)
    assert len(params["shards"].split(",")) == 4


@pytest.mark.parametrize("kind", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_the_probe_takes_its_arguments_and_ends_before_the_kubelet_gives_up(kind, capsys):
    container = containers("tuned", "StatefulSet")[0]
    command = container[kind]["exec"]["command"]
    assert command[:3] == ["python3", "-m", probe.__name__]
    args = ["--http=127.0.0.1:1" if arg.startswith("--http=") else arg for arg in command[3:]]
    assert probe.main(args) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
    timeout_s = float(next(arg for arg in command if arg.startswith("--timeout-s=")).partition("=")[2])
    assert 0 < timeout_s < container[kind]["timeoutSeconds"]
    assert f"--repo={container['volumeMounts'][0]['mountPath']}" in command


def test_tritonserver_takes_the_shards_arguments(tmp_path):
    spec = find_spec("pytriton")
    assert spec is not None, "nvidia-pytriton is not installed: run `make setup`"
    site = Path(str(spec.origin)).parents[1]
    container = containers("many_shards", "StatefulSet")[3]
    args = [str(tmp_path / "none") if arg == "/models" else arg for arg in container["args"][1:]]
    args = [arg.replace("=/models", f"={tmp_path / 'none'}") for arg in args]
    env = os.environ | {"LD_LIBRARY_PATH": str(site / "nvidia_pytriton.libs")}
    done = subprocess.run(
        [site / "pytriton/tritonserver/bin/tritonserver", *args],
        env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert f"failed to stat file {tmp_path / 'none'}" in output, output[-2000:]


def test_a_shards_shell_clears_what_a_killed_server_left_and_becomes_the_server(tmp_path):
    container = containers("defaults", "StatefulSet")[0]
    shell, flag, script, name = container["command"]
    assert (shell, flag, name, container["args"][0]) == ("/bin/sh", "-c", "tritonserver", "tritonserver")
    assert script.count("/dev/shm/") == 1
    left, other = tmp_path / "triton_python_backend_shm_region_1", tmp_path / "kjts_1"
    left.touch()
    other.touch()
    done = subprocess.run(
        [shell, flag, script.replace("/dev/shm/", f"{tmp_path}/"), name, "printf", "%s|", "--a=1 2", "--b"],
        capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.stdout == "--a=1 2|--b|"
    assert [path.name for path in tmp_path.iterdir()] == ["kjts_1"]
