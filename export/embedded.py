"""Owns a shard's program with its state inside, as one TorchScript file: what Triton's ``pytorch_libtorch`` loads."""

import hashlib
import os
from pathlib import Path

import torch

from export.contract import StateFile
from export.programs import ShardModule
from export.progress import Progress
from export.state import ShardState, materialise
from export.trace import script_embedded

_BLOCK_BYTES = 8 << 20


def write_embedded(path: Path, state: ShardState, on_progress: Progress) -> StateFile:
    """Write a self-contained ``model.pt`` onto the disk; holds one shard's state in memory while it does.

    Its ``forward(ids, table_lengths, version)`` needs nothing but torch and the operators of fbgemm_gpu.

    Raises:
        OSError: The disk is full, or does not take the file for another reason.
    """
    tensors = materialise(state, on_progress, f"writing {path.parent.name}")
    program = script_embedded(state.kind, [tensors[name] for name in ShardModule(state.kind).state_names])
    return _save(program, path)


def _save(program: torch.jit.ScriptModule, path: Path) -> StateFile:
    """Save by way of a file in memory, which takes the state's size once more.

    ``torch.jit.save`` aborts the process when it cannot write a path, takes three times the state for a file object, and
    cannot write a tensor without numbers into a pipe.
    """
    digest = hashlib.sha256()
    with os.fdopen(os.memfd_create(path.name), "rb") as memory, path.open("xb") as file:
        torch.jit.save(program, f"/proc/self/fd/{memory.fileno()}")
        while block := memory.read(_BLOCK_BYTES):
            file.write(block)
            digest.update(block)
        file.flush()
        os.fsync(file.fileno())
    return StateFile(path=path.name, size_bytes=path.stat().st_size, sha256=digest.hexdigest())
