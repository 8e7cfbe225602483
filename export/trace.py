"""Owns the making of artifacts from programs: ``torch.export`` and TorchScript; must not know a table or a file.

A traced program is the same for every shard of its kind and dimension, so it is made once in a process.
"""

import functools
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from export.programs import InputHashProgram, MchShard, PlainShard
from export.source import InputHash


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardProgram:
    """Both artifacts of one shard program, as the bytes of their files."""

    exported: bytes
    """``shard.pt2``."""
    torchscript: bytes
    """``model.pt``."""
    state_names: tuple[str, ...]
    """Names of the inputs after ids and table_lengths, in order."""


@functools.cache
def trace_shard(*, managed: bool, dim: int) -> ShardProgram:
    """Trace the shard program for rows of ``dim`` numbers.

    Args:
        managed: True for managed-collision tables, False for plain ones.
        dim: Embedding dimension, fixed in the program; every other size is dynamic.
    """
    program = MchShard() if managed else PlainShard()
    examples = _mch_examples(dim) if managed else _plain_examples(dim)
    with _quiet():
        return ShardProgram(
            exported=_export(program, examples),
            torchscript=_script(program),
            state_names=program.state_names,
        )


def trace_input_hash(input_hash: InputHash) -> ExportedProgram:
    """Trace an ``input_hash_func`` with its size; raises whatever the function or the tracer raises."""
    program = InputHashProgram(input_hash.function, input_hash.size).eval()
    with torch.no_grad(), _quiet():
        return torch.export.export(
            program, (torch.tensor([3, 1 << 40, -5, 0, 77]),), dynamic_shapes=({0: Dim.AUTO},), strict=False
        )


def save_exported(exported: ExportedProgram) -> bytes:
    """The bytes of a ``.pt2`` file."""
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(exported, buffer)
    return buffer.getvalue()


def load_exported(content: bytes) -> nn.Module:
    """The program of a ``.pt2`` file, callable."""
    with _quiet():
        return torch.export.load(io.BytesIO(content)).module()


def load_torchscript(content: bytes) -> nn.Module:
    """The program of a ``model.pt`` file, callable."""
    with _quiet():
        program: nn.Module = torch.jit.load(io.BytesIO(content))  # type: ignore[no-untyped-call]
    return program


def _export(program: nn.Module, examples: tuple[torch.Tensor, ...]) -> bytes:
    _meta_kernel()
    dynamic = tuple({0: Dim.AUTO} for _ in examples)
    return save_exported(torch.export.export(program, examples, dynamic_shapes=dynamic, strict=False))


def _script(program: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(program), buffer)
    return buffer.getvalue()


def _mch_examples(dim: int) -> tuple[torch.Tensor, ...]:
    """Sizes that differ from each other and from 0 and 1, so that the tracer ties none of them together."""
    table = torch.full((29, 2), -1)
    table_offsets = torch.tensor([0, 9, 17, 25, 29])
    rows = torch.zeros(11, dim)
    return (
        torch.arange(5),
        torch.tensor([2, 0, 3]),
        table,
        table_offsets,
        torch.arange(11),
        rows,
        torch.tensor([8, 9, 10]),
    )


def _plain_examples(dim: int) -> tuple[torch.Tensor, ...]:
    starts, stops, offsets = torch.tensor([0, 2, 4]), torch.tensor([3, 6, 7]), torch.tensor([0, 1, 3])
    return torch.arange(5), torch.tensor([2, 0, 3]), starts, stops, offsets, torch.zeros(11, dim)


@functools.cache
def _meta_kernel() -> torch.library.Library:
    """Give the lookup the kernel that tracing needs; a saved program loads without it.

    ``torch.library.register_fake`` is refused for this op. The registration lasts as long as what is returned.
    """
    library = torch.library.Library("fbgemm", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    if not torch._C._dispatch_has_kernel_for_dispatch_key("fbgemm::pruned_hashmap_lookup", "Meta"):
        library.impl("pruned_hashmap_lookup", _lookup_meta)  # type: ignore[no-untyped-call]
    return library


def _lookup_meta(ids: torch.Tensor, *_tables: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(ids)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide upstream's own deprecations; ``model.pt`` is TorchScript on purpose, for Triton's pytorch platform."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield
