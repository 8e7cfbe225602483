"""Owns the proof that a version's files answer as the module does; must not write or publish anything.

Every program is loaded back from its file with its state (``export.loaded``), ids are routed by the contract's rule, and
each shard's answers held against ``export.oracle``: bit by bit, int8 rows within the bound that the manifest states.

Shape suffixes: N ids of one table, M ids of a request to one shard, D embedding dimension, C columns on a shard.
"""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from export.changes import Touched
from export.contract import NO_ROW, Manifest, Routing, RowDtype, Shard, Table
from export.errors import ExportError
from export.loaded import LoadedVersion, check_clean_process, load_version, portions
from export.oracle import Answer, eval_mode, find_rows, hash_ids, look_up
from export.progress import Progress
from export.routes import shard_of
from export.samples import IdsByTable, draw_requests, special_ids, sweep_ids
from export.source import CollectionSource, TableSource

_RELEASE_EVERY = 16
"""Sweeps of a few megabytes of rows; a map's own pages are touched all over by each."""


def check_version(
    directory: Path,
    manifest: Manifest,
    source: CollectionSource,
    on_progress: Progress,
    *,
    shards: Collection[int] | None = None,
) -> int:
    """Hold the files in ``directory`` against the module; see ``check_loaded``.

    Args:
        directory: The version's directory.
        manifest: Its manifest.
        source: What it was exported from; it need not have rows of other shards than those that are checked.
        on_progress: Told (step, bytes of rows done, of how many).
        shards: Which ones; None: all.

    Raises:
        ExportError: A file does not load, or an answer differs; names the table and the first id that differs.
    """
    chosen = frozenset(range(manifest.num_shards) if shards is None else shards)
    check_clean_process(directory, manifest, chosen)
    return sum(
        check_loaded(load_version(directory, manifest, portion), source, on_progress)
        for portion in portions(manifest, chosen)
    )


def check_loaded(
    version: LoadedVersion, source: CollectionSource, on_progress: Progress, *, touched: Touched | None = None
) -> int:
    """Hold the shards that were loaded against the module.

    Args:
        version: Its shards.
        source: What it was exported from; it need not have rows of other shards.
        on_progress: Told (step, bytes of rows done, of how many).
        touched: Of a delta, the only rows that ``source`` has; None: it has all, and every id is compared.

    Returns:
        How many ids were compared.

    Raises:
        ExportError: An answer differs; names the table and the first id that differs.
    """
    manifest = version.manifest
    _check_tables(manifest, source, whole=len(version.programs) == manifest.num_shards)
    version.check_maps()
    compared = 0
    step, row_bytes = "checking the answers", 4 * source.dim
    total, done = sum(_num_swept(table) for table in source.tables) * row_bytes, 0
    on_progress(step, 0, total)
    with eval_mode(source.module):
        if touched is not None:
            chosen = {table.name: _touched_ids(version, table, touched) for table in source.tables}
            return _compare(version, source, chosen, raw=False, all_programs=True)
        for raw, ids_by_table in draw_requests(source):
            compared += _compare(version, source, ids_by_table, raw=raw, all_programs=True)
            on_progress(step, 0, total)
        for table in source.tables:
            ids = itertools.chain([version.overlaid_ids(table.name)], sweep_ids(table))
            for at, ids_N in enumerate(ids):
                compared += _compare(version, source, {table.name: ids_N}, raw=False, all_programs=False)
                done += int(ids_N.shape[0]) * row_bytes
                if at % _RELEASE_EVERY == 0:
                    version.release()
                on_progress(step, min(done, total), total)
    return compared


def _touched_ids(version: LoadedVersion, table: TableSource, touched: Touched) -> torch.Tensor:
    """Special ids, those of the overlay and those of touched rows, as far as they answer with a row that is there."""
    rows = touched[table.name]
    known = rows if table.map is None else table.map.ids_K[torch.isin(table.map.rows_K, rows)]
    ids_N = torch.cat([special_ids(table), version.overlaid_ids(table.name), known])
    rows_N, _ = find_rows(table, ids_N, version.manifest.table(table.name).unknown)
    return ids_N[torch.isin(rows_N, rows) | (rows_N == NO_ROW)]


def _num_swept(table: TableSource) -> int:
    return table.rows if table.map is None else int(table.map.ids_K.shape[0])


def _check_tables(manifest: Manifest, source: CollectionSource, *, whole: bool) -> None:
    """The version must be of this module's tables and options, with just this module's ids in its maps."""
    served = [table.name for table in manifest.tables]
    names = [table.name for table in source.tables]
    if served != names:
        raise ExportError(f"the version holds tables {served}, the module has {names}")
    if manifest.need_indices != source.need_indices:
        raise ExportError(f"the version has need_indices {manifest.need_indices}, the module {source.need_indices}")
    for table, entry in zip(source.tables, manifest.tables, strict=True):
        ids = 0 if table.map is None else int(table.map.ids_K.shape[0])
        held = sum(piece.zch_rows for shard in manifest.shards for piece in shard.tables if piece.table == table.name)
        for what, found, wanted in (
            ("rows", entry.rows, table.rows),
            ("dim", entry.dim, table.dim),
            ("features", entry.features, table.features),
            ("embedding names", entry.embedding_names, table.embedding_names),
            ("managed collision", entry.zch is not None, table.map is not None),
            ("ids in the map", held if whole else ids, ids),
        ):
            if found != wanted:
                raise ExportError(f"table {table.name}: the version has {what} {found}, the module {wanted}")


def _compare(
    version: LoadedVersion, source: CollectionSource, ids_by_table: IdsByTable, *, raw: bool, all_programs: bool
) -> int:
    sources = {table.name: table for table in source.tables}
    hashed = {name: _hashed(version, sources[name], ids) if raw else ids for name, ids in ids_by_table.items()}
    routed = {name: _route(version, sources[name], ids) for name, ids in hashed.items()}
    compared = 0
    for index, programs in version.programs.items():
        shard = version.manifest.shards[index]
        expected = [routed[entry.table].get(index) if entry.table in routed else None for entry in shard.tables]
        empty = torch.empty(0, dtype=torch.int64)
        pieces = [empty if want is None else want.ids_M for want in expected]
        compared += sum(int(ids_M.shape[0]) for ids_M in pieces)
        for file, program in programs.items():
            answers = program(shard, pieces)
            if all_programs:
                version.release()  # ids at random bring in far more than their rows
            for entry, want, got in zip(shard.tables, expected, answers, strict=True):
                if want is not None:
                    _hold(version.manifest.table(entry.table), shard, want, got, where=f"shard {index} ({file})")
            if not all_programs:
                break
    return compared


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """One table's ids that one shard is asked, and the module's answers to them."""

    ids_M: torch.Tensor
    answer: Answer
    int8_error_M: torch.Tensor | None
    """FP32: what each id's numbers may differ by as int8 of their own row; None: they are not int8."""


def _route(version: LoadedVersion, table: TableSource, ids_N: torch.Tensor) -> Mapping[int, _Asked]:
    """By shard that is checked: its ids and the module's answers, of the columns that it has."""
    entry = version.manifest.table(table.name)
    holders = [shard for shard in version.programs if entry.pieces_on(shard)]
    shards = None
    if entry.routing not in {Routing.COLUMNS, Routing.REPLICATED}:
        shards = torch.from_numpy(shard_of(entry, ids_N, version.manifest.num_shards))
    found = {}
    for shard in holders:
        ids_M = ids_N if shards is None else ids_N[shards == shard]
        spans = [slice(piece.col_start, piece.col_stop) for piece in entry.pieces_on(shard)]
        answer = look_up(table, ids_M, entry.unknown, columns=spans)
        error_M = None
        if entry.row_dtype is RowDtype.INT8:
            cut = entry.routing is Routing.COLUMNS
            error_M = _int8_error(table.numbers.gather(answer.row_ids_N) if cut else answer.embeddings_ND)
        found[shard] = _Asked(ids_M=ids_M, answer=answer, int8_error_M=error_M)
    return found


def _int8_error(rows_MD: torch.Tensor) -> torch.Tensor:
    """Half a step of each row's own 255, and what FP32 arithmetic on its numbers may lose, FP32 [M]."""
    if not rows_MD.numel():
        return torch.zeros(rows_MD.shape[0])
    low_M, high_M = torch.aminmax(rows_MD, dim=1)
    numbers = torch.finfo(torch.float32)
    return (high_M - low_M) / 510 + torch.maximum(low_M.abs(), high_M.abs()) * 4 * numbers.eps + numbers.tiny


def _hold(table: Table, shard: Shard, want: _Asked, got: Answer, *, where: str) -> None:
    """Raise ExportError when a shard's answer is not the module's, in the format in which its rows are stored."""
    bound = next(entry.max_error for entry in shard.tables if entry.table == table.name)
    numbers = _differing(table.row_dtype, bound, want, got.embeddings_ND)
    differs = numbers.any(1) | (got.row_ids_N != want.answer.row_ids_N) | (got.hits_N != want.answer.hits_N)
    if not bool(differs.any()):
        return
    first = int(differs.nonzero()[0])
    found, wanted = (f"row {int(a.row_ids_N[first])} hit {bool(a.hits_N[first])}" for a in (got, want.answer))
    raise ExportError(
        f"table {table.name}: {where} differs from the module in {int(differs.sum())} of "
        f"{len(want.ids_M)} ids; first id {int(want.ids_M[first])}: {found}, "
        f"{'but other numbers' if found == wanted else f'the module says {wanted}'}"
    )


def _differing(row_dtype: RowDtype, bound: float, want: _Asked, got_MC: torch.Tensor) -> torch.Tensor:
    """Which numbers are not the trained ones in their stored format, or further from them than stated: BOOL [M, C]."""
    rows_MC = want.answer.embeddings_ND
    error_MC = (got_MC - rows_MC).abs()
    if row_dtype is RowDtype.INT8:
        assert want.int8_error_M is not None
        return ~(error_MC <= want.int8_error_M[:, None].clamp(max=bound))  # so that a NaN differs
    stored_MC = rows_MC.half().float() if row_dtype is RowDtype.FP16 else rows_MC
    stray_MC = got_MC.view(torch.int32) != stored_MC.view(torch.int32)
    return stray_MC | (error_MC.nan_to_num(0.0, 0.0, 0.0) > bound)


def _hashed(version: LoadedVersion, table: TableSource, ids_N: torch.Tensor) -> torch.Tensor:
    expected = hash_ids(table, ids_N)
    file = version.manifest.table(table.name).input_hash
    found = ids_N if file is None else version.input_hashes[file](ids_N)
    if not torch.equal(found, expected):
        raise ExportError(f"table {table.name}: {file or 'no input hash'} hashes ids differently from the module")
    return expected
