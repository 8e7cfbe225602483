"""Owns a shard's probes: a few ids of every kind with the answers that they must get, for whoever is to serve it.

They lie beside the shard's files. A front tier asks for them before it lets a version answer.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from export.contract import Routing, Shard, StateFile, Table, shard_dir
from export.contract.layout import PROBES_FILE
from export.contract.publishing import write_file
from export.loaded import LoadedVersion
from export.routes import shard_of
from export.source import CollectionSource, TableSource

_OF_EACH = 4
"""Ids of each kind: known ones, ids that a delta moved or evicted, unknown ones."""
_DRAWN = 256


def write_probes(version: LoadedVersion, directory: Path, source: CollectionSource) -> Iterator[StateFile]:
    """Write the probes of the shards that are loaded; call it inside ``eval_mode``.

    The file holds ``ids`` INT64 [N], ``table_lengths`` INT64 [T], and what the shard's program answers to them:
    ``embeddings`` FP32 [N', W], ``row_ids`` INT64 [N], ``hits`` BOOL [N].

    Yields:
        Each file with its path relative to the directory.
    """
    tables = {table.name: table for table in source.tables}
    for index, programs in version.programs.items():
        shard = version.manifest.shards[index]
        pieces = [_choose(version, tables[entry.table], shard) for entry in shard.tables]
        answers = next(iter(programs.values()))(shard, pieces)
        content = save(
            {
                "ids": torch.cat([*pieces, torch.empty(0, dtype=torch.int64)]),
                "table_lengths": torch.tensor([len(ids) for ids in pieces], dtype=torch.int64),
                "embeddings": _join([answer.embeddings_ND.reshape(-1, shard.width) for answer in answers], shard.width),
                "row_ids": torch.cat([*(answer.row_ids_N for answer in answers), torch.empty(0, dtype=torch.int64)]),
                "hits": torch.cat([*(answer.hits_N for answer in answers), torch.empty(0, dtype=torch.bool)]),
            }
        )
        place = shard_dir(directory, index)
        file = write_file(place / PROBES_FILE, content)
        yield file.model_copy(update={"path": f"{place.name}/{file.path}"})


def _join(rows: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    return torch.cat([*rows, torch.empty(0, width)]).contiguous()


def _choose(version: LoadedVersion, source: TableSource, shard: Shard) -> torch.Tensor:
    """Known, moved, evicted and unknown ids that are asked on this shard, INT64."""
    table = version.manifest.table(source.name)
    known = _known(table, source, shard.index, version.manifest.num_shards)
    overlaid = _on(table, version.overlaid_ids(table.name), shard.index, version.manifest.num_shards)
    served = torch.isin(overlaid, known)
    drawn = torch.from_numpy(np.random.default_rng(shard.index).integers(-(1 << 62), 1 << 62, size=_DRAWN))
    unknown = _on(table, drawn[~torch.isin(drawn, known)], shard.index, version.manifest.num_shards)
    return torch.cat([_few(ids) for ids in (known, overlaid[served], overlaid[~served], unknown)])


def _known(table: Table, source: TableSource, shard: int, num_shards: int) -> torch.Tensor:
    if source.map is not None:
        return _on(table, source.map.ids_K, shard, num_shards)
    piece = table.pieces_on(shard)[0]
    size = min(piece.row_stop - piece.row_start, _OF_EACH)
    return torch.linspace(piece.row_start, max(piece.row_stop - 1, piece.row_start), size, dtype=torch.float64).long()


def _on(table: Table, ids: torch.Tensor, shard: int, num_shards: int) -> torch.Tensor:
    """Those of the ids that are asked on a shard."""
    if table.routing in {Routing.COLUMNS, Routing.REPLICATED}:
        return ids
    return ids[torch.from_numpy(shard_of(table, ids, num_shards)) == shard]


def _few(ids: torch.Tensor) -> torch.Tensor:
    return ids[:: max(1, ids.shape[0] // _OF_EACH)][:_OF_EACH]
