"""Owns the proof that a version's files answer as the module does; must not write or publish anything.

Every program is loaded back from the file, every state is mapped from the file, ids are routed by the contract's
rule and the shards' answers merged, then held against ``export.oracle`` bit by bit.

Shape suffixes: N ids of one table, M ids of a request to one shard, D embedding dimension.
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
from export.source import CollectionSource
from export.state import map_state
from export.trace import load_exported, load_torchscript

_PROGRAMS: Mapping[str, Callable[[bytes], nn.Module]] = {
    PROGRAM_FILE: load_exported,
    TORCHSCRIPT_FILE: load_torchscript,
}
_POISON = -7


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVersion:
    """A version's artifacts, ready to answer."""

    manifest: Manifest
    programs: tuple[Mapping[str, nn.Module], ...]
    """For each shard its programs, by file name."""
    states: tuple[tuple[torch.Tensor, ...], ...]
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
                on_progress(f"checking {table.name}", min(done, total), total)
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
    expected = {name: look_up(sources[name], ids, version.manifest.table(name).unknown) for name, ids in hashed.items()}
    for file in files:
        for name, answer in _answer(version, hashed, file).items():
            if not answer.equals(expected[name]):
                raise ExportError(
                    _difference(version.manifest, name, file, hashed[name], got=answer, want=expected[name])
                )
    return sum(int(ids.shape[0]) for ids in hashed.values())


def _hashed(version: LoadedVersion, source: CollectionSource, name: str, ids_N: torch.Tensor) -> torch.Tensor:
    table = next(table for table in source.tables if table.name == name)
    expected = hash_ids(table, ids_N)
    file = version.manifest.table(name).input_hash
    found = ids_N if file is None else version.input_hashes[file](ids_N)
    if not torch.equal(found, expected):
        raise ExportError(f"table {name}: {file or 'no input hash'} hashes ids differently from the module")
    return expected


def _answer(version: LoadedVersion, ids_by_table: IdsByTable, file: str) -> dict[str, Answer]:
    """Route ids after the input hash, ask every shard once, put the answers in place."""
    manifest = version.manifest
    answers = {name: _poisoned(int(ids.shape[0]), manifest.dim) for name, ids in ids_by_table.items()}
    shards = {name: shard_of(manifest.table(name), ids, manifest.num_shards) for name, ids in ids_by_table.items()}
    for shard in manifest.shards:
        chosen = {name: torch.from_numpy(np.flatnonzero(at == shard.index)) for name, at in shards.items()}
        held = [entry.table for entry in shard.tables]
        pieces = [
            ids_by_table[name][chosen[name]] if name in chosen else torch.empty(0, dtype=torch.int64) for name in held
        ]
        for name, piece in zip(held, _ask(version, shard, pieces, file), strict=True):
            if name in chosen:
                answers[name].embeddings_ND[chosen[name]] = piece.embeddings_ND
                answers[name].row_ids_N[chosen[name]] = piece.row_ids_N
                answers[name].hits_N[chosen[name]] = piece.hits_N
    return answers


def _ask(version: LoadedVersion, shard: Shard, pieces: list[torch.Tensor], file: str) -> Iterator[Answer]:
    ids_M = torch.cat([*pieces, torch.empty(0, dtype=torch.int64)])
    lengths = [int(piece.shape[0]) for piece in pieces]
    program = version.programs[shard.index][file]
    try:
        with torch.no_grad():
            embeddings, row_ids, hits = program(
                ids_M, torch.tensor(lengths, dtype=torch.int64), *version.states[shard.index]
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


def _poisoned(num_ids: int, dim: int) -> Answer:
    return Answer(
        embeddings_ND=torch.full((num_ids, dim), float(_POISON)),
        row_ids_N=torch.full((num_ids,), _POISON),
        hits_N=torch.zeros(num_ids, dtype=torch.bool),
    )


def _difference(manifest: Manifest, name: str, file: str, ids_N: torch.Tensor, *, got: Answer, want: Answer) -> str:
    rows = (got.embeddings_ND.view(torch.int32) != want.embeddings_ND.view(torch.int32)).any(1)
    differs = rows | (got.row_ids_N != want.row_ids_N) | (got.hits_N != want.hits_N)
    first = int(differs.nonzero()[0])
    id_ = ids_N[first : first + 1]
    shard = int(shard_of(manifest.table(name), id_, manifest.num_shards)[0])
    found, wanted = (f"row {int(a.row_ids_N[first])} hit {bool(a.hits_N[first])}" for a in (got, want))
    return (
        f"table {name}: shard {shard} ({file}) differs from the module in {int(differs.sum())} of {len(ids_N)} ids; "
        f"first id {int(id_)}: {found}, {'but other numbers' if found == wanted else f'the module says {wanted}'}"
    )
