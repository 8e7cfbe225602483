"""Owns config.pbtxt: the generated text for one shard's Triton model; must not write it."""

import importlib.resources

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from export.contract import Runtime, Shard
from export.contract.layout import CONFIG_FILE


def render_config(shard: Shard, runtime: Runtime) -> str:
    """config.pbtxt of a shard's Triton model: the template, with its name, its device and what runs it.

    Under ``pytorch_libtorch`` the template's names are those of the arguments of ``forward``, and its outputs, whose
    names end in no ``__<index>``, are taken in the template's order (Triton's PyTorch backend, *naming conventions*).
    """
    template = importlib.resources.files("model_repo") / CONFIG_FILE
    config = model_config_pb2.ModelConfig()
    text_format.Parse(template.read_text(encoding="utf-8"), config)
    config.name = shard.model
    if runtime is Runtime.PYTORCH:
        config.ClearField("backend")
        config.platform = "pytorch_libtorch"
    if shard.device != "cpu":
        (group,) = config.instance_group
        group.kind = model_config_pb2.ModelInstanceGroup.KIND_GPU
        group.gpus.append(int(shard.device.removeprefix("cuda:")))
    rendered: str = text_format.MessageToString(config)
    return rendered
