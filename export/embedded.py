"""Owns a shard's program with its state inside, as one TorchScript file: what Triton's ``pytorch_libtorch`` loads."""

import hashlib
import os
from pathlib import Path

import torch

from export.contract import StateFile
from export.progress import Progress
from export.state import ShardState, materialise
from export.trace import script_embedded, trace_shard


def write_embedded(path: Path, state: ShardState, on_progress: Progress) -> StateFile:
    """Write a self-contained ``model.pt`` onto the disk; holds one shard's state in memory while it does.

    Its ``forward(ids, table_lengths, version)`` needs nothing but torch and the operators of fbgemm_gpu.
    """
    tensors = materialise(state, on_progress, f"writing {path.parent.name}")
    program = script_embedded(state.kind, [tensors[name] for name in trace_shard(state.kind).state_names])
    torch.jit.save(program, str(path))
    with path.open("rb+") as file:
        digest = hashlib.file_digest(file, "sha256")
        os.fsync(file.fileno())
    return StateFile(path=path.name, size_bytes=path.stat().st_size, sha256=digest.hexdigest())
