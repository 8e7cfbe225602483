"""Owns the proof that a version's files answer as the module does; must not write or publish anything.

Every program is loaded back from the file, every state is mapped from the file, ids are routed by the contract's
rule, and each shard's answers held against ``export.oracle`` bit by bit.

Shape suffixes: N ids of one table, M ids of a request to one shard, D embedding dimension, S one entry a shard.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from export.contract import Manifest, Routing, Shard, Table, hash_shard, shard_dir
from export.contract.layout import PROGRAM_FILE, STATE_FILE, TORCHSCRIPT_FILE
from export.errors import ExportError
from export.oracle import Answer, eval_mode, hash_ids, look_up
from export.progress import Progress
from export.samples import IdsByTable, draw_requests, sweep_ids
from export.source import CollectionSource, TableSource
from export.state import map_state
from export.trace import load_exported, load_torchscript

_PROGRAMS: Mapping[str, Callable[[bytes], nn.Module]] = {
    PROGRAM_FILE: load_exported,
    TORCHSCRIPT_FILE: load_torchscript,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVersion:
    """A version's artifacts, ready to answer."""

    manifest: Manifest
    programs: tuple[Mapping[str, nn.Module], ...]
    """For each shard its programs, by file name."""
    states: tuple[list[torch.Tensor], ...]
    input_hashes: Mapping[str, nn.Module]
    """By file name."""


def check_version(directory: Path, manifest: Manifest, source: CollectionSource, on_progress: Progress) -> int:
    """Hold the files in ``directory`` against the module.

    Returns:
        How many ids were compared.

    Raises:
        ExportError: A file does not load, or an answer differs; names the table and the first id that differs.
    """
    _check_tables(manifest, source)
    version = _load(directory, manifest)
    _check_maps(version)
    compared = 0
    with eval_mode(source.module):
        for raw, ids_by_table in draw_requests(source):
            compared += _compare(version, source, ids_by_table, raw=raw, files=tuple(_PROGRAMS))
        for table in source.tables:
            done, total = 0, table.rows if table.map is None else int(table.map.ids_K.shape[0])
            for ids_N in sweep_ids(table):
                compared += _compare(version, source, {table.name: ids_N}, raw=False, files=(PROGRAM_FILE,))
                done += int(ids_N.shape[0])
                on_progress(f"checking rows of {table.name}", min(done, total), total)
    return compared


def _check_tables(manifest: Manifest, source: CollectionSource) -> None:
    """The version must be of this module's tables, with just this module's ids in its maps."""
    served = [table.name for table in manifest.tables]
    names = [table.name for table in source.tables]
    if served != names:
        raise ExportError(f"the version holds tables {served}, the module has {names}")
    for table, entry in zip(source.tables, manifest.tables, strict=True):
        ids = 0 if table.map is None else int(table.map.ids_K.shape[0])
        held = sum(piece.zch_rows for shard in manifest.shards for piece in shard.tables if piece.table == table.name)
        for what, found, wanted in (
            ("rows", entry.rows, table.rows),
            ("dim", entry.dim, table.dim),
            ("features", entry.features, table.features),
            ("embedding names", entry.embedding_names, table.embedding_names),
            ("managed collision", entry.zch is not None, table.map is not None),
            ("ids in the map", held, ids),
        ):
            if found != wanted:
                raise ExportError(f"table {table.name}: the version has {what} {found}, the module {wanted}")


def _check_maps(version: LoadedVersion) -> None:
    """A map holds as many ids as the manifest says; with every known id found later, it holds no other."""
    for shard, state in zip(version.manifest.shards, version.states, strict=True):
        if "hash_table" in shard.state:
            found = int((state[shard.state.index("hash_table")][:, 0] != -1).sum())
            wanted = sum(entry.zch_rows for entry in shard.tables)
            if found != wanted:
                raise ExportError(f"shard {shard.index}: its map holds {found} ids, the manifest says {wanted}")


def _load(directory: Path, manifest: Manifest) -> LoadedVersion:
    loaded: dict[str, nn.Module] = {}

    def program(path: Path, load: Callable[[bytes], nn.Module]) -> nn.Module:
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if digest not in loaded:
            loaded[digest] = load(content)
        return loaded[digest]

    try:
        places = [shard_dir(directory, shard.index) for shard in manifest.shards]
        names = {table.input_hash for table in manifest.tables if table.input_hash is not None}
        return LoadedVersion(
            manifest=manifest,
            programs=tuple({file: program(at / file, load) for file, load in _PROGRAMS.items()} for at in places),
            states=tuple(
                map_state(at / STATE_FILE, shard.state) for at, shard in zip(places, manifest.shards, strict=True)
            ),
            input_hashes={name: program(directory / name, load_exported) for name in names},
        )
    except Exception as exc:  # upstream's loaders raise what they like
        raise ExportError(f"{directory}: its files cannot be loaded: {exc}") from exc


def _compare(
    version: LoadedVersion, source: CollectionSource, ids_by_table: IdsByTable, *, raw: bool, files: tuple[str, ...]
) -> int:
    hashed = {name: _hashed(version, source, name, ids) if raw else ids for name, ids in ids_by_table.items()}
    sources = {table.name: table for table in source.tables}
    routed = {name: _route(version.manifest, sources[name], ids) for name, ids in hashed.items()}
    for shard in version.manifest.shards:
        empty = torch.empty(0, dtype=torch.int64)
        held = [entry.table for entry in shard.tables]
        pieces = [routed[name].ids_S[shard.index] if name in routed else empty for name in held]
        wanted = [routed[name].expected_S[shard.index] if name in routed else None for name in held]
        for file in files:
            for name, ids_M, got, want in zip(held, pieces, _ask(version, shard, pieces, file), wanted, strict=True):
                if want is not None and not got.equals(want):
                    raise ExportError(_difference(name, f"shard {shard.index} ({file})", ids_M, got=got, want=want))
    return sum(int(ids.shape[0]) for ids in hashed.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Routed:
    """One table's ids, each with one shard, and the module's answers to them; all of it views of one piece of memory."""

    ids_S: tuple[torch.Tensor, ...]
    """By shard: INT64 [M]."""
    expected_S: tuple[Answer, ...]


def _route(manifest: Manifest, table: TableSource, ids_N: torch.Tensor) -> _Routed:
    """Bring ids into the order of their shards before the module is asked, so that answers are compared in place."""
    entry = manifest.table(table.name)
    shards = torch.from_numpy(shard_of(entry, ids_N, manifest.num_shards))
    counts = torch.bincount(shards, minlength=manifest.num_shards).tolist()
    holders = {placement.shard for placement in entry.placements}
    assert all(shard in holders for shard, count in enumerate(counts) if count)  # else ids would go unchecked
    if max(counts) < len(ids_N):
        ids_N = ids_N[torch.argsort(shards, stable=True)]
    answer = look_up(table, ids_N, entry.unknown)
    rows_S = torch.split(answer.embeddings_ND, counts)
    row_ids_S, hits_S = torch.split(answer.row_ids_N, counts), torch.split(answer.hits_N, counts)
    parts = zip(rows_S, row_ids_S, hits_S, strict=True)
    return _Routed(
        ids_S=torch.split(ids_N, counts),
        expected_S=tuple(Answer(embeddings_ND=rows, row_ids_N=ids, hits_N=hits) for rows, ids, hits in parts),
    )


def _hashed(version: LoadedVersion, source: CollectionSource, name: str, ids_N: torch.Tensor) -> torch.Tensor:
    table = next(table for table in source.tables if table.name == name)
    expected = hash_ids(table, ids_N)
    file = version.manifest.table(name).input_hash
    found = ids_N if file is None else version.input_hashes[file](ids_N)
    if not torch.equal(found, expected):
        raise ExportError(f"table {name}: {file or 'no input hash'} hashes ids differently from the module")
    return expected


def _ask(version: LoadedVersion, shard: Shard, pieces: list[torch.Tensor], file: str) -> Iterator[Answer]:
    ids_M = torch.cat([*pieces, torch.empty(0, dtype=torch.int64)])
    lengths = [int(piece.shape[0]) for piece in pieces]
    program = version.programs[shard.index][file]
    try:
        with torch.no_grad():
            embeddings, row_ids, hits = program(
                ids_M, torch.tensor(lengths, dtype=torch.int64), version.states[shard.index]
            )
    except Exception as exc:  # a broken program may raise anything
        raise ExportError(f"shard {shard.index}: {file} fails on {lengths} ids: {exc}") from exc
    wanted = (
        (torch.float32, (ids_M.shape[0], version.manifest.dim)),
        (torch.int64, ids_M.shape),
        (torch.bool, ids_M.shape),
    )
    for output, (dtype, shape) in zip((embeddings, row_ids, hits), wanted, strict=True):
        if output.dtype != dtype or tuple(output.shape) != tuple(shape):
            raise ExportError(
                f"shard {shard.index}: an answer is {output.dtype} {tuple(output.shape)}, not {dtype} {tuple(shape)}"
            )
    parts = zip(embeddings.split(lengths), row_ids.split(lengths), hits.split(lengths), strict=True)
    return (Answer(embeddings_ND=rows, row_ids_N=ids, hits_N=hit) for rows, ids, hit in parts)


def shard_of(table: Table, ids_N: torch.Tensor, num_shards: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Shard of each id by the contract's rule, INT64 [N].

    An id of a plain table that no range holds goes to the first or the last shard, to prove that they answer zeros.
    """
    ids = ids_N.numpy()
    if table.routing is Routing.HASH:
        return hash_shard(ids.view(np.uint64), num_shards).astype(np.int64)
    if table.routing is Routing.TABLE:
        return np.full(ids.shape, table.placements[0].shard, dtype=np.int64)
    stops = np.array([piece.row_stop for piece in table.placements], dtype=np.int64)
    place = np.searchsorted(stops, ids, side="right").clip(0, len(stops) - 1)
    return np.take(np.array([piece.shard for piece in table.placements], dtype=np.int64), place)


def _difference(name: str, where: str, ids_M: torch.Tensor, *, got: Answer, want: Answer) -> str:
    rows = (got.embeddings_ND.view(torch.int32) != want.embeddings_ND.view(torch.int32)).any(1)
    differs = rows | (got.row_ids_N != want.row_ids_N) | (got.hits_N != want.hits_N)
    first = int(differs.nonzero()[0])
    found, wanted = (f"row {int(a.row_ids_N[first])} hit {bool(a.hits_N[first])}" for a in (got, want))
    return (
        f"table {name}: {where} differs from the module in {int(differs.sum())} of {len(ids_M)} ids; "
        f"first id {int(ids_M[first])}: {found}, {'but other numbers' if found == wanted else f'the module says {wanted}'}"
    )
