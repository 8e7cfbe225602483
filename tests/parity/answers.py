"""What a collection must answer to a request, from the oracle's answers to every id that requests are drawn from.

Shape suffixes: P ids of a table's pool, M rows of the reply, D embedding dimension.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from export.contract import Manifest, RowDtype
from tests.oracle import TableOracle
from tests.parity.requests import Request
from tests.parity.tables import TableCase
from tests.parity.trained import Trained


@dataclass(frozen=True, kw_only=True)
class TableAnswers:
    """The oracle's answers to a table's pool of ids."""

    table: TableCase
    ids_P: NDArray[np.int64]
    """Ascending."""
    embeddings_PD: NDArray[np.float32]
    row_ids_P: NDArray[np.int64]
    hits_P: NDArray[np.bool_]
    max_error_P: NDArray[np.float32]
    """How far a served number may lie from the trained one: 0 but for int8."""

    @property
    def known(self) -> list[int]:
        return self.ids_P[self.hits_P].tolist()

    def places(self, ids_N: NDArray[np.integer]) -> NDArray[np.int64]:
        found = np.searchsorted(self.ids_P, ids_N)
        assert (self.ids_P[found] == ids_N).all()
        return found


@dataclass(frozen=True, kw_only=True)
class Collection:
    """An exported collection of the suite."""

    name: str
    trained: Trained
    manifest: Manifest
    tables: dict[str, TableAnswers]

    def pools(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Known and strange ids of each feature; known to each of the tables that share it."""
        known: dict[str, list[int]] = {}
        strange: dict[str, list[int]] = {}
        for answers in self.tables.values():
            for feature in answers.table.features:
                sets = [other for other in self.tables.values() if feature in other.table.features]
                ids = set(answers.ids_P.tolist()).intersection(*(other.ids_P.tolist() for other in sets))
                in_all = ids.intersection(*(other.known for other in sets))
                known[feature], strange[feature] = sorted(in_all), sorted(ids - in_all)
        return known, strange

    def expected(self, request: Request) -> dict[str, NDArray]:
        """Every output of the reply, with ``max_error`` [M, 1] for the embeddings beside them."""
        blocks: dict[str, list[NDArray]] = defaultdict(list)
        for key, lengths, places_N in request.written_out:
            ids = request.values_N[places_N]
            for answers in self.tables.values():
                if key in answers.table.features:
                    at = answers.places(ids)
                    blocks["embeddings"].append(answers.embeddings_PD[at])
                    blocks["row_ids"].append(answers.row_ids_P[at])
                    blocks["hits"].append(answers.hits_P[at])
                    blocks["max_error"].append(answers.max_error_P[at, None])
                    blocks["output_lengths"].append(np.array(lengths, dtype=np.int32))
                    blocks["indices"].append(answers.row_ids_P[at] if answers.table.managed else ids.astype(np.int64))
                    blocks["missing"].append(np.zeros(ids.size, dtype=np.bool_))
                    if request.weights_N is not None:
                        blocks["weights"].append(request.weights_N[places_N])
        return {name: np.concatenate(parts) for name, parts in blocks.items()}

    def default_outputs(self, request: Request) -> set[str]:
        weights = {"weights"} if request.weights_N is not None else set()
        return {"embeddings"} | weights | ({"indices"} if self.manifest.need_indices else set())


def answer_pool(trained: Trained, manifest: Manifest, table: TableCase, *, zero: bool, seed: int) -> TableAnswers:
    """Ask the oracle once for everything that requests may hold; plain tables that refuse strange ids get none."""
    rng = np.random.default_rng(seed)
    pool = trained.pool(table)
    if table.managed or zero:
        pool += [*rng.integers(-(2**63), 2**63 - 1, 20).tolist(), *rng.integers(-40, 3000, 60).tolist()]
    ids_P = np.unique(np.array(pool, dtype=np.int64))
    oracle = trained.oracle(table, zero=zero)
    answer = oracle.look_up(torch.from_numpy(ids_P))
    embeddings_PD = answer.embeddings_ND.numpy()
    row_dtype = manifest.table(table.name).row_dtype
    if row_dtype is RowDtype.FP16:
        embeddings_PD = embeddings_PD.astype(np.float16).astype(np.float32)
    return TableAnswers(
        table=table,
        ids_P=ids_P,
        embeddings_PD=embeddings_PD,
        row_ids_P=answer.row_ids_N.numpy(),
        hits_P=answer.hits_N.numpy(),
        max_error_P=_max_error(oracle, answer.row_ids_N, manifest, table)
        if row_dtype is RowDtype.INT8
        else np.zeros(ids_P.size, dtype=np.float32),
    )


def _max_error(
    oracle: TableOracle, row_ids_P: torch.Tensor, manifest: Manifest, table: TableCase
) -> NDArray[np.float32]:
    """Of a row, 1/255 of its range, and never more than the manifest states for the table."""
    stated = max(entry.max_error for shard in manifest.shards for entry in shard.tables if entry.table == table.name)
    weight_RD = oracle.weight_RD.float()
    low_R, high_R = weight_RD.amin(1), weight_RD.amax(1)
    # The scale and bias are FP32 themselves: half a unit in the last place of the largest number, twice.
    bound_R = (high_R - low_R) / 255 + torch.maximum(low_R.abs(), high_R.abs()) * 2**-22
    bound_P = torch.where(row_ids_P < 0, 0.0, bound_R[row_ids_P.clamp(min=0)])
    return np.minimum(bound_P.numpy(), np.float32(stated))
