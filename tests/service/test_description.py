"""Descriptions read the same as JSON and as the protocol's messages."""

from dataclasses import replace

import orjson
from google.protobuf.json_format import MessageToDict, ParseDict
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.model_config_pb2 import TYPE_FP32, TYPE_INT32, TYPE_INT64, TYPE_STRING, ModelConfig

from service.description import model_config, model_metadata, model_statistics, repository_index, server_metadata
from service.types import CollectionInfo, CollectionStatistics, Output, Readiness

INFO = CollectionInfo(name="clicks", versions=(1, 2), default_version=2, features=("user", "item"), dim=64)
COUNTS = CollectionStatistics(success_count=2**40, success_ns=2**60, fail_count=1, fail_ns=2, ids_count=3)


def test_every_description_is_a_message_of_the_protocol():
    for content, message in (
        (server_metadata(), pb.ServerMetadataResponse()),
        (model_metadata(INFO), pb.ModelMetadataResponse()),
        ({"config": model_config(INFO)}, pb.ModelConfigResponse()),
        ({"model_stats": [model_statistics(INFO, COUNTS)]}, pb.ModelStatisticsResponse()),
        (
            {"models": repository_index([(INFO, Readiness(ready=True))], only_ready=False)},
            pb.RepositoryIndexResponse(),
        ),
    ):
        parsed = ParseDict(content, message)
        again = ParseDict(MessageToDict(parsed, preserving_proto_field_name=True), type(message)())
        assert again == parsed
        assert orjson.loads(orjson.dumps(content)) == content


def test_the_config_names_types_and_what_is_optional():
    config = ParseDict(model_config(INFO), ModelConfig())
    types = [TYPE_INT64, TYPE_INT64, TYPE_STRING, TYPE_FP32, TYPE_INT32, TYPE_INT64]
    assert [tensor.data_type for tensor in config.input] == types
    assert [tensor.optional for tensor in config.input] == [False, False, True, True, True, True]
    assert config.output[0].data_type == TYPE_FP32
    assert list(config.output[0].dims) == [-1, 64]
    assert config.max_batch_size == 0


def test_metadata_lists_every_output_that_any_request_may_ask_for():
    """perf_analyzer asks for all of them; weights go only with the input, indices with a module that needs them."""
    listed = {tensor["name"] for tensor in model_metadata(INFO)["outputs"]}
    assert listed == {output.value for output in Output} - {"weights", "indices"}
    needing = replace(INFO, need_indices=True)
    assert {tensor["name"] for tensor in model_metadata(needing)["outputs"]} == listed | {"indices"}
