"""What the exporter copies beside every shard: the way in from Triton's isolated interpreter, and its configuration."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

import model_repo

SOURCE = Path(model_repo.__file__).parent
FAKE_STUB = "import sys, types; sys.modules['triton_python_backend_utils'] = types.ModuleType('pb'); "


def run_isolated(code: str, pythonpath: str) -> subprocess.CompletedProcess[str]:
    """Run code as Triton's stub does: environment ignored, no site-packages of ours."""
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return subprocess.run(
        [python, "-I", "-S", "-c", FAKE_STUB + code],
        env={"PYTHONPATH": pythonpath},
        capture_output=True,
        text=True,
        check=False,
    )


def test_model_py_finds_the_runtime_through_pythonpath_in_an_isolated_interpreter(tmp_path):
    (tmp_path / "model.py").write_bytes((SOURCE / "model.py").read_bytes())
    path = os.pathsep.join([str(SOURCE.parent), sysconfig.get_path("purelib")])
    done = run_isolated(
        f"sys.path.append({str(tmp_path)!r}); import model; print(model.TritonPythonModel.__module__)", path
    )
    assert done.stdout == "model_repo.runtime\n", done.stderr


def test_model_py_says_what_to_install_when_kjtserve_is_not_there(tmp_path):
    (tmp_path / "model.py").write_bytes((SOURCE / "model.py").read_bytes())
    done = run_isolated(f"sys.path.append({str(tmp_path)!r}); import model", "")
    assert done.returncode == 1
    assert "ImportError: no module 'model_repo' in Triton's Python" in done.stderr
    assert "install kjtserve" in done.stderr


def test_the_configuration_template_is_what_shards_serve():
    config = text_format.Parse((SOURCE / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    types = model_config_pb2.DataType
    assert [(i.name, types.Name(i.data_type), list(i.dims)) for i in config.input] == [
        ("ids", "TYPE_INT64", [-1]),
        ("table_lengths", "TYPE_INT64", [-1]),
        ("version", "TYPE_INT64", [1]),
    ]
    assert [(o.name, types.Name(o.data_type), list(o.dims)) for o in config.output] == [
        ("embeddings", "TYPE_FP32", [-1, -1]),
        ("row_ids", "TYPE_INT64", [-1]),
        ("hits", "TYPE_BOOL", [-1]),
    ]
    assert (config.backend, config.max_batch_size, config.version_policy.latest.num_versions) == ("python", 0, 2)
    assert [(group.kind, group.count) for group in config.instance_group] == [(2, 1)], "one KIND_CPU instance"
