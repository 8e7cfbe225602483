"""Owns config.pbtxt: the generated text for one shard's Triton model; must not write it."""

import importlib.resources

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from export.contract.layout import CONFIG_FILE
from export.errors import ExportError

_TEMPLATE = """
backend: "python"
max_batch_size: 0
input { name: "ids" data_type: TYPE_INT64 dims: [-1] }
input { name: "table_lengths" data_type: TYPE_INT64 dims: [-1] }
input { name: "version" data_type: TYPE_INT64 dims: [1] }
output { name: "embeddings" data_type: TYPE_FP32 dims: [-1, -1] }
output { name: "row_ids" data_type: TYPE_INT64 dims: [-1] }
output { name: "hits" data_type: TYPE_BOOL dims: [-1] }
instance_group { kind: KIND_CPU count: 1 }
version_policy { latest { num_versions: 2 } }
"""


def render_config(model: str) -> str:
    """config.pbtxt of the Triton model of that name, from the runtime's template."""
    template = importlib.resources.files("model_repo") / CONFIG_FILE
    text = template.read_text(encoding="utf-8") if template.is_file() else _TEMPLATE
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as exc:
        raise ExportError(f"{template}: not a Triton model configuration: {exc}") from exc
    config.name = model
    rendered: str = text_format.MessageToString(config)
    return rendered
