"""Owns how collections are described in the protocol's own terms: metadata, config, statistics, repository index.

Everything is a plain dictionary that reads the same as JSON and as the protocol's protobuf messages, so that both edges
say the same thing.
"""

from collections.abc import Iterable
from importlib.metadata import version as installed_version
from typing import Any

from service.types import CollectionInfo, CollectionStatistics, Readiness

PLATFORM = "kjtserve"
SERVER_NAME = "kjtserve"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics", "parameters")

_CONFIG_TYPES = {
    "INT64": "TYPE_INT64",
    "INT32": "TYPE_INT32",
    "BYTES": "TYPE_STRING",
    "FP32": "TYPE_FP32",
    "BOOL": "TYPE_BOOL",
}

_INPUTS: tuple[tuple[str, str, list[int]], ...] = (
    ("values", "INT64", [-1]),
    ("lengths", "INT64", [-1]),
    ("keys", "BYTES", [-1]),
    ("weights", "FP32", [-1]),
    ("stride_per_key", "INT32", [-1]),
    ("inverse_indices", "INT64", [-1, -1]),
)
_REQUIRED = frozenset({"values", "lengths"})


def _outputs(info: CollectionInfo) -> tuple[tuple[str, str, list[int]], ...]:
    """What any request may ask for, which perf_analyzer does; ``weights`` goes only with the input of that name."""
    return (
        ("embeddings", "FP32", [-1, info.dim]),
        ("output_lengths", "INT32", [-1]),
        ("row_ids", "INT64", [-1]),
        ("hits", "BOOL", [-1]),
        ("unique_embeddings", "FP32", [-1, info.dim]),
        ("inverse", "INT64", [-1]),
        ("missing", "BOOL", [-1]),
        *((("indices", "INT64", [-1]),) if info.need_indices else ()),
    )


def server_metadata() -> dict[str, Any]:
    """``ServerMetadataResponse``."""
    return {"name": SERVER_NAME, "version": installed_version("kjtserve"), "extensions": list(EXTENSIONS)}


def model_metadata(info: CollectionInfo) -> dict[str, Any]:
    """``ModelMetadataResponse``: all inputs and outputs; the served versions, oldest first."""
    return {
        "name": info.name,
        "versions": [str(version) for version in info.versions],
        "platform": PLATFORM,
        "inputs": [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in _INPUTS],
        "outputs": [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in _outputs(info)],
    }


def model_config(info: CollectionInfo) -> dict[str, Any]:
    """``ModelConfig`` of Triton's model configuration extension; perf_analyzer does not start without it."""
    return {
        "name": info.name,
        "platform": PLATFORM,
        "backend": "",
        "version_policy": {"specific": {"versions": list(info.versions)}},
        "max_batch_size": 0,
        "input": [
            {"name": name, "data_type": _CONFIG_TYPES[datatype], "dims": shape, "optional": name not in _REQUIRED}
            for name, datatype, shape in _INPUTS
        ],
        "output": [
            {"name": name, "data_type": _CONFIG_TYPES[datatype], "dims": shape}
            for name, datatype, shape in _outputs(info)
        ],
        "parameters": {"features": {"string_value": ",".join(info.features)}},
        "model_transaction_policy": {"decoupled": False},
    }


def model_statistics(info: CollectionInfo, counts: CollectionStatistics) -> dict[str, Any]:
    """One entry of ``ModelStatisticsResponse.model_stats``: the collection's counts, under its default version."""
    none = {"count": 0, "ns": 0}
    answered = {"count": counts.success_count, "ns": counts.success_ns}
    return {
        "name": info.name,
        "version": str(info.default_version),
        "last_inference": 0,
        "inference_count": counts.success_count,
        "execution_count": counts.success_count,
        "inference_stats": {
            "success": answered,
            "fail": {"count": counts.fail_count, "ns": counts.fail_ns},
            "queue": none,
            "compute_input": none,
            "compute_infer": answered,
            "compute_output": none,
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [],
    }


def repository_index(models: Iterable[tuple[CollectionInfo, Readiness]], *, only_ready: bool) -> list[dict[str, Any]]:
    """``RepositoryIndexResponse.models``: every served version with its state, and why when it is not ready.

    Args:
        models: Collections with their readiness.
        only_ready: Leave out what is not ready.
    """
    return [
        {
            "name": info.name,
            "version": str(version),
            "state": "READY" if readiness.ready else "UNAVAILABLE",
            "reason": "; ".join(readiness.reasons),
        }
        for info, readiness in models
        for version in info.versions
        if readiness.ready or not only_ready
    ]
