"""Owns a shard's program with its state inside, as one TorchScript file: what Triton's ``pytorch_libtorch`` loads."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from export.contract import StateFile
from export.progress import Progress
from export.state import ShardState, materialise
from export.trace import script_embedded, trace_shard

_WRITER = """
import hashlib, json, os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)  # it ends when its input does
print(flush=True)
error, size, digest = 0, 0, hashlib.sha256()
blocks = iter(lambda: sys.stdin.buffer.read1(1 << 20), b"")
try:
    with open(sys.argv[1], "xb") as file:
        for block in blocks:
            file.write(block)
            digest.update(block)
            size += len(block)
        file.flush()
        os.fsync(file.fileno())
except OSError as exc:
    error = exc.errno
for _ in blocks:
    pass
print(json.dumps([error, size, digest.hexdigest()]))
"""
"""Takes a file on stdin; says that it listens, then its errno, size and SHA-256."""


def write_embedded(path: Path, state: ShardState, on_progress: Progress) -> StateFile:
    """Write a self-contained ``model.pt`` onto the disk; holds one shard's state in memory while it does.

    Its ``forward(ids, table_lengths, version)`` needs nothing but torch and the operators of fbgemm_gpu.

    Raises:
        OSError: The disk is full, or does not take the file for another reason.
    """
    tensors = materialise(state, on_progress, f"writing {path.parent.name}")
    program = script_embedded(state.kind, [tensors[name] for name in trace_shard(state.kind).state_names])
    return _save(program, path)


def _save(program: torch.jit.ScriptModule, path: Path) -> StateFile:
    """Save through a pipe to a small process (10 MB) that owns the file.

    ``torch.jit.save`` aborts this process when it cannot write a path, and takes three times the state for a file object.
    It holds the GIL, so a thread cannot read what it writes.
    """
    command = [sys.executable, "-I", "-S", "-c", _WRITER, str(path)]
    with subprocess.Popen(  # noqa: S603  our own interpreter, our own text
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        if writer.stdout.readline():
            torch.jit.save(program, f"/proc/self/fd/{writer.stdin.fileno()}")
        writer.stdin.close()
        said = writer.stdout.read()
    error, size, digest = json.loads(said) if said else (errno.EPIPE, 0, "")
    if error:
        raise OSError(error, os.strerror(error), str(path))
    return StateFile(path=path.name, size_bytes=size, sha256=digest)
