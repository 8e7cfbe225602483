"""Owns the expected answers: TorchRec's own modules, table by table, in eval mode; must not look at an artifact.

The collection's own forward is no oracle: it splits a request in config order but runs its modules in dict order,
keeps the first request's key order, and fails on an empty batch. So each table is asked by name, through its own
``preprocess``, ``remap`` and ``nn.Embedding``. Sentinel ids are unknown by rule (``export.contract.SENTINEL_IDS``),
although an id of int64 max "hits" an empty slot upstream.

Shape suffixes: N ids, D embedding dimension.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from export.contract import NO_ROW, SENTINEL_IDS, Unknown
from export.source import MapSource, TableSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Rows of N ids."""

    embeddings_ND: torch.Tensor
    """FP32."""
    row_ids_N: torch.Tensor
    """INT64, −1 where the answer is no row of the table."""
    hits_N: torch.Tensor
    """BOOL."""

    def equals(self, other: "Answer") -> bool:
        """Whether the answers agree bit by bit, so that a NaN equals itself and 0.0 differs from −0.0."""
        return (
            torch.equal(self.embeddings_ND.view(torch.int32), other.embeddings_ND.view(torch.int32))
            and torch.equal(self.row_ids_N, other.row_ids_N)
            and torch.equal(self.hits_N, other.hits_N)
        )


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode, without gradients, and give each its own flag back afterwards."""
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in flags:
            part.training = training


def hash_ids(table: TableSource, ids_N: torch.Tensor) -> torch.Tensor:
    """Ids after the table's ``input_hash_func``, INT64 [N]; the ids themselves if it has none."""
    if table.map is None or table.map.input_hash is None or not ids_N.numel():
        return ids_N
    return _values(table.map, ids_N.clone(), method="preprocess")


def look_up(table: TableSource, ids_N: torch.Tensor, unknown: Unknown) -> Answer:
    """What the trained module answers to ids INT64 [N] after the input hash; call it inside ``eval_mode``.

    An id of a plain table that is out of range gets zeros, row id −1 and no hit.
    """
    if table.map is None:
        hits_N = (ids_N >= 0) & (ids_N < table.rows)
        rows_N = ids_N
        zero = True
    else:
        rows_N, hits_N = _remap(table, table.map, ids_N)
        zero = unknown is Unknown.ZERO
    if zero:
        rows_N = torch.where(hits_N, rows_N, NO_ROW)
    return Answer(embeddings_ND=table.numbers.gather(rows_N), row_ids_N=rows_N, hits_N=hits_N)


def _remap(table: TableSource, source: MapSource, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows_N = _values(source, ids_N, method="remap")
    module: Any = source.pieces[0].module
    raw_ids = module._mch_sorted_raw_ids
    hits_N = module._match_indices(raw_ids, ids_N.to(raw_ids.device))[0].cpu()
    for sentinel in SENTINEL_IDS:
        hits_N &= ids_N != sentinel
        rows_N = torch.where(ids_N == sentinel, table.rows - 1, rows_N)
    return rows_N, hits_N


def _values(table: MapSource, ids_N: torch.Tensor, *, method: str) -> torch.Tensor:
    module: Any = table.pieces[0].module
    on_device_N = ids_N.to(module.device)
    features = {
        "ids": JaggedTensor(values=on_device_N, lengths=torch.tensor([ids_N.numel()], device=on_device_N.device))
    }
    values: torch.Tensor = getattr(module, method)(features)["ids"].values()
    return values.cpu()
