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

from export.programs import EmbeddedShard, InputHashProgram, ProgramKind, ShardModule
from export.remaps import BUCKET_STATE
from export.row_dtypes import DTYPES
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
def trace_shard(kind: ProgramKind) -> ShardProgram:
    """Trace a shard program; only its kind is fixed in it, every size but the width is dynamic."""
    module = ShardModule(kind).eval()
    examples = _examples(kind, module.state_names)
    with _quiet():
        return ShardProgram(
            exported=_export(module, examples), torchscript=_script(module), state_names=module.state_names
        )


def script_embedded(kind: ProgramKind, state: list[torch.Tensor]) -> torch.jit.ScriptModule:
    """The program of a shard with its state inside, in TorchScript: what ``pytorch_libtorch`` loads."""
    with _quiet():
        scripted: torch.jit.ScriptModule = torch.jit.script(EmbeddedShard(ShardModule(kind).eval(), state))
    return scripted


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


def _export(program: nn.Module, examples: tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]) -> bytes:
    _meta_kernel()
    dynamic = ({0: Dim.AUTO}, {0: Dim.AUTO}, [{0: Dim.AUTO} for _ in examples[2]])
    with torch.no_grad():
        exported = torch.export.export(program, examples, dynamic_shapes=dynamic, strict=False)
    # The tracer asserts that what is cast lies where it lay in the example. A program runs wherever its state is.
    for node in exported.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        exported.graph.erase_node(node)
    return save_exported(exported)


def _script(program: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(program), buffer)
    return buffer.getvalue()


_BUCKETS = (4, 7, -(1 << 63), 2, 0, 0)


def _examples(kind: ProgramKind, state_names: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Three tables; sizes that differ from each other and from 0 and 1, so that the tracer ties none of them together."""
    rows, buckets, changed = 11, 6, 5
    default_rows = torch.arange(2, 2 + buckets) if "bucketed" in kind.remap else torch.tensor([8, 9, 10])
    tensors = {
        "row_starts": torch.tensor([0, 2, 4]),
        "row_stops": torch.tensor([3, 6, 7]),
        "row_offsets": torch.tensor([1, 2, 3]),
        "row_units": torch.tensor([1, 2, 1]),
        "hash_table": torch.full((29, 2), -1),
        "hash_table_offsets": torch.tensor([0, 9, 17, 25, 29]),
        "row_ids": torch.arange(rows),
        "unknown_rows": default_rows,
        "identities": torch.arange(rows)[:, None].clone(),
        "slot_counts": torch.ones(buckets, dtype=torch.int64),
        "slot_offsets": torch.arange(buckets),
        "miss_counts": torch.ones(buckets, dtype=torch.int64),
        "miss_offsets": torch.arange(buckets),
        "miss_rows": torch.tensor([-1, -1, 3]),
        "probe_kinds": torch.tensor([0, 1, 0]),
        "mpzch_tables": torch.tensor([0, 1, 0]),
        "overlay_map": torch.full((31, 2), -1),
        "overlay_map_offsets": torch.tensor([0, 8, 16, 23, 31]),
        "overlay_minus_one": torch.tensor([-1, 0, 1]),
        "overlay_locals": torch.arange(3),
        "overlay_row_ids": torch.arange(3),
        "overlay_hits": torch.ones(3, dtype=torch.int64),
        "overlay_changed": torch.full((17, 2), -1),
        "overlay_changed_offsets": torch.tensor([0, 9, 17]),
        "overlay_row_scales": torch.ones(changed, 2),
        "overlay_rows": torch.zeros(changed, kind.width, dtype=DTYPES[kind.row_dtype]),
        "row_scales": torch.ones(rows, 2),
        "rows": torch.zeros(rows, kind.width, dtype=DTYPES[kind.row_dtype]),
        **{name: torch.tensor([value] * 3) for name, value in zip(BUCKET_STATE, _BUCKETS, strict=True)},
        "bucket_firsts": torch.tensor([0, 2, 4]),
    }
    own = [name if name in tensors else name.partition("_")[2] for name in state_names]  # mch_… and mpzch_… of a mix
    # A copy each: the tracer takes two inputs of one tensor for one input.
    return torch.arange(5), torch.tensor([2, 0, 3]), [tensors[name].clone() for name in own]


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
