"""Owns asking for exactly some versions of a model: its configuration with the version policy replaced.

A model's own policy takes the newest versions, and a load after an export would unload the one that is being served.
Must not talk to Triton.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from export.contract import RepositoryError
from export.contract.layout import CONFIG_FILE


def choose_versions(repo: Path, models: Mapping[str, Sequence[int]] | Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The versions that are asked for of each model, ascending; of a mere name, the newest in the repository.

    Raises:
        RepositoryError: It holds no version of such a model.
    """
    if isinstance(models, Mapping):
        return {model: tuple(sorted(versions)) for model, versions in models.items()}
    return {model: (_newest_version(repo, model),) for model in models}


def read_config(repo: Path, model: str) -> Any:
    """A model's ``config.pbtxt`` as a ``ModelConfig`` message.

    Raises:
        RepositoryError: There is none, or it is not one.
    """
    path = repo / model / CONFIG_FILE
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(path.read_text(encoding="utf-8"), config)
    except OSError as exc:
        raise RepositoryError(f"{repo}: holds no Triton model {model!r}: {path}: {exc.strerror}") from exc
    except (text_format.ParseError, UnicodeDecodeError) as exc:
        raise RepositoryError(f"{path}: is not a Triton model configuration: {exc}") from exc
    return config


def pin_versions(config: Any, versions: Sequence[int]) -> str:
    """The configuration as the JSON that a load takes, asking for just ``versions``; ``config`` stays as it is."""
    pinned = model_config_pb2.ModelConfig()
    pinned.CopyFrom(config)
    pinned.version_policy.Clear()
    pinned.version_policy.specific.versions[:] = sorted(versions)
    text: str = json_format.MessageToJson(pinned, preserving_proto_field_name=True, indent=None)
    return text


def _newest_version(repo: Path, model: str) -> int:
    directory = repo / model
    versions = [int(path.name) for path in directory.iterdir() if path.name.isdecimal()] if directory.is_dir() else []
    if not versions:
        raise RepositoryError(f"{repo}: holds no version of a Triton model {model!r}")
    return max(versions)
