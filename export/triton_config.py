"""Owns config.pbtxt: the generated text for one shard's Triton model; must not write it."""

import importlib.resources

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from export.contract.layout import CONFIG_FILE


def render_config(model: str) -> str:
    """config.pbtxt of the Triton model of that name: the runtime's template with its name set."""
    template = importlib.resources.files("model_repo") / CONFIG_FILE
    config = model_config_pb2.ModelConfig()
    text_format.Parse(template.read_text(encoding="utf-8"), config)
    config.name = model
    rendered: str = text_format.MessageToString(config)
    return rendered
