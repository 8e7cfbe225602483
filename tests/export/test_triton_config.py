"""config.pbtxt: what every shard has in common, and what its device and its runtime change."""

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from export.contract import Runtime, Shard, shard_model_name
from export.triton_config import render_config


def config_of(device="cpu", runtime=Runtime.PYTHON):
    shard = Shard(
        index=1,
        model=shard_model_name("clicks", 1),
        tables=(),
        width=4,
        device=device,
        state=("rows",),
        state_bytes=16,
    )
    return text_format.Parse(render_config(shard, runtime), model_config_pb2.ModelConfig())


@pytest.mark.parametrize("runtime", list(Runtime))
@pytest.mark.parametrize("device", ["cpu", "cuda:3"])
def test_every_shard_has_the_same_tensors_and_version_policy(runtime, device):
    config = config_of(device, runtime)
    assert config.name == "clicks_shard_1"
    assert [tensor.name for tensor in config.input] == ["ids", "table_lengths", "version"]
    assert [tensor.name for tensor in config.output] == ["embeddings", "row_ids", "hits"]
    assert config.max_batch_size == 0
    assert config.version_policy.latest.num_versions == 2


def test_a_shard_on_the_cpu_runs_there():
    (group,) = config_of().instance_group
    assert (group.kind, list(group.gpus), group.count) == (model_config_pb2.ModelInstanceGroup.KIND_CPU, [], 1)


@pytest.mark.parametrize("number", [0, 12])
def test_a_shard_on_a_gpu_runs_on_that_one_alone(number):
    (group,) = config_of(f"cuda:{number}").instance_group
    assert (group.kind, list(group.gpus), group.count) == (model_config_pb2.ModelInstanceGroup.KIND_GPU, [number], 1)


def test_the_runtime_names_what_triton_loads():
    python, pytorch = config_of(), config_of(runtime=Runtime.PYTORCH)
    assert (python.backend, python.platform) == ("python", "")
    assert (pytorch.backend, pytorch.platform) == ("", "pytorch_libtorch")


def test_the_pytorch_backend_takes_the_outputs_in_their_order():
    """A name with ``__<number>`` would be an index of its own."""
    config = config_of(runtime=Runtime.PYTORCH)
    assert not [tensor.name for tensor in (*config.input, *config.output) if "__" in tensor.name]
