"""Owns how a shard's state file becomes tensors: mapped, and read only onto a GPU; must not know what they mean."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from model_repo.errors import ShardLoadError


def map_state(path: Path, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Map the tensors of a safetensors file into memory.

    The mapping is private and its pages are never written, so all processes that map the file share the page cache.

    Args:
        path: The state file.
        names: Every tensor of the file, in the order wanted.

    Returns:
        The tensors, in the order of ``names``.

    Raises:
        ShardLoadError: The file is no safetensors file, or holds other tensors than ``names``.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            held = set(file.keys())
            if held != set(names):
                raise ShardLoadError(
                    f"{path}: holds tensors {sorted(held)}, the manifest says {sorted(names)}: "
                    "file and manifest are of different versions; copy the version directory again"
                )
            return tuple(file.get_tensor(name) for name in names)
    except (SafetensorError, OSError) as exc:
        raise ShardLoadError(f"{path}: not a safetensors file ({exc}): copy the version directory again") from exc


def place_state(state: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The tensors on a device: mapped as they are on the CPU, copied once to a GPU."""
    return [tensor.to(device) for tensor in state]
