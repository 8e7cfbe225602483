"""Owns the check that this process' libraries can run an artifact; must not read one."""

import importlib
from types import ModuleType

import torch

from export.contract import Shard, Toolchain
from model_repo.errors import ShardLoadError


def check_numpy(version: str) -> None:
    """Refuse numpy 2 and later.

    With Triton 2.51, ``pb_utils.Tensor(numpy array)`` of numpy 2 is empty without any error.

    Raises:
        ShardLoadError: ``version`` is 2 or later.
    """
    if _major(version) >= 2:
        raise ShardLoadError(
            f"numpy {version}: this Triton turns numpy 2 arrays into empty tensors; `pip install 'numpy<2'` "
            "in the environment that Triton's Python backend uses"
        )


def check_toolchain(written_by: Toolchain, *, torch: str, fbgemm_gpu: str) -> None:
    """Refuse an artifact of another major version of torch or FBGEMM.

    Raises:
        ShardLoadError: A major version differs.
    """
    for name, wrote, here in (("torch", written_by.torch, torch), ("fbgemm_gpu", written_by.fbgemm_gpu, fbgemm_gpu)):
        if _major(wrote) != _major(here):
            raise ShardLoadError(
                f"the artifact was exported with {name} {wrote}, this process has {name} {here}: install {name} "
                f"{_major(wrote)}.x here, or export again with {name} {here}"
            )


def import_fbgemm() -> ModuleType:
    """Import FBGEMM, whose operators the programs call.

    Raises:
        ShardLoadError: It is not installed, or its library does not load.
    """
    try:
        return importlib.import_module("fbgemm_gpu")
    except (ImportError, OSError) as exc:
        raise ShardLoadError(
            f"fbgemm_gpu does not import ({exc}), and without it the artifact's operators are unknown: install "
            "kjtserve with its 'cpu' or 'gpu' extra in the environment that Triton's Python backend uses"
        ) from exc


def _major(version: str) -> int:
    head = version.split(".", 1)[0]
    if not head.isdecimal():
        raise ShardLoadError(f"version {version!r} does not start with a number")
    return int(head)


def check_device(shard: Shard) -> None:
    """Hold the device that the manifest places a shard on against this machine.

    Raises:
        ShardLoadError: There is no such GPU.
    """
    device = torch.device(shard.device)
    if device.type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ShardLoadError(
            f"{shard.model}: placed on {shard.device}, and this process sees {count} GPUs: run it where that GPU is, or "
            "export with --device cpu"
        )
