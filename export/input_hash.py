"""Owns the artifacts of ``input_hash_func``: traced, proved element-wise, one file for each function and size.

The front tier runs them before dedup and routing, so an id's hash must depend on that id alone. Must not write files.

Shape suffixes: N ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from export.contract import INT64_MAX
from export.errors import ExportError
from export.oracle import eval_mode, hash_ids
from export.source import CollectionSource, TableSource
from export.trace import load_exported, save_exported, trace_input_hash

_SIZES = (1, 2, 7, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputHashFiles:
    """The programs of a collection's input hashes."""

    contents: Mapping[str, bytes]
    """By file name."""
    file_of: Mapping[str, str]
    """File name by table; tables without an input hash are left out."""


def trace_input_hashes(source: CollectionSource) -> InputHashFiles:
    """Trace every table's input hash; tables that share function and size share a file.

    Raises:
        ExportError: A function cannot be traced, is not element-wise or not INT64; names the table.
    """
    contents: dict[str, bytes] = {}
    file_of: dict[str, str] = {}
    seen: dict[tuple[int, int], str] = {}
    with eval_mode(source.module):
        for table in source.tables:
            if table.map is None or table.map.input_hash is None:
                continue
            key = (id(table.map.input_hash.function), table.map.input_hash.size)
            if key not in seen:
                seen[key] = f"input_hash_{len(seen)}.pt2"
                contents[seen[key]] = _trace(table)
            file_of[table.name] = seen[key]
    return InputHashFiles(contents=contents, file_of=file_of)


def _trace(table: TableSource) -> bytes:
    assert table.map is not None and table.map.input_hash is not None  # noqa: PT018  one invariant of the caller
    try:
        exported = trace_input_hash(table.map.input_hash)
        foreign = sorted(
            {
                str(node.target)
                for node in exported.graph.nodes
                if isinstance(node.target, torch._ops.OpOverload)
                and node.target.namespace not in ("aten", "prims", "prim")
            }
        )
        content = save_exported(exported)
        program = load_exported(content)
    except Exception as exc:  # the function is the user's, and the tracer raises many kinds
        raise _refusal(table, f"torch.export cannot trace it ({type(exc).__name__}: {_first_line(exc)})") from exc
    if foreign:
        raise _refusal(table, f"it calls {foreign[0]}, which the front tier does not have")
    _check(table, program)
    return content


def _check(table: TableSource, program: nn.Module) -> None:
    rng = np.random.default_rng(7)
    for size in _SIZES:
        ids_N = torch.from_numpy(_draw(rng, size))
        wanted_N = hash_ids(table, ids_N)
        if wanted_N.dtype != torch.int64 or wanted_N.shape != ids_N.shape:
            raise _refusal(table, f"it turns INT64 {list(ids_N.shape)} into {wanted_N.dtype} {list(wanted_N.shape)}")
        if not torch.equal(_run(table, program, ids_N), wanted_N):
            raise _refusal(table, f"the traced program differs from it on {size} ids")
        order = torch.from_numpy(rng.permutation(size))
        half = order[: size // 2 + 1]
        for part in (order, half):
            if not torch.equal(hash_ids(table, ids_N[part]), wanted_N[part]):
                raise _refusal(table, "an id's hash depends on the ids beside it, or on chance")
    if _run(table, program, torch.empty(0, dtype=torch.int64)).shape != (0,):
        raise _refusal(table, "the traced program fails on no ids")


def _run(table: TableSource, program: nn.Module, ids_N: torch.Tensor) -> torch.Tensor:
    try:
        hashed_N: torch.Tensor = program(ids_N.clone())
    except Exception as exc:  # a specialised program raises what it likes
        raise _refusal(table, f"the traced program fails on {ids_N.shape[0]} ids ({_first_line(exc)})") from exc
    return hashed_N


def _draw(rng: np.random.Generator, size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    ids = rng.integers(-INT64_MAX - 1, INT64_MAX, size=size, dtype=np.int64)
    ids[::3] = rng.integers(-100, 1000, size=ids[::3].shape)
    edges = np.array([0, -1, INT64_MAX, -INT64_MAX - 1], dtype=np.int64)
    if size > len(edges):
        ids[: len(edges)] = edges
    return ids


def _refusal(table: TableSource, why: str) -> ExportError:
    return ExportError(
        f"table {table.name}: its input_hash_func cannot be served: {why}; "
        "use tensor operations that treat every id alone, INT64 in and INT64 out"
    )


def _first_line(exc: BaseException) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip()), "no message")
