"""Owns a version's artifacts loaded back from its files, ready to answer; must not know what the answers should be.

Shape suffixes: N ids of one table, M ids of a request to one shard.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from export.contract import Kind, Manifest, Remap, Runtime, Shard, shard_dir
from export.contract.layout import PROGRAM_FILE, TORCHSCRIPT_FILE
from export.errors import ExportError
from export.oracle import Answer
from export.stored import StoredShard
from export.trace import load_exported, load_torchscript

Lookup = Callable[[Shard, Sequence[torch.Tensor]], list[Answer]]
"""(the manifest's entry, ids INT64 of each of its tables) → each table's answer, rows [N, numbers on this shard]."""

_CLEAN_PROCESS = """
import json, sys
import torch, fbgemm_gpu
for path, lengths in json.loads(sys.argv[1]):
    print(path, flush=True)
    rows, row_ids, hits = torch.jit.load(path)(torch.tensor([0]), torch.tensor(lengths), torch.tensor([1]))
foreign = {name.partition(".")[0] for name in sys.modules} & {"torchrec", "export", "service", "model_repo"}
sys.exit(f"it brought {sorted(foreign)} in" if foreign else 0)
"""
"""Loads each ``model.pt`` where nothing but torch and fbgemm_gpu is imported, and asks it for id 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVersion:
    """The shards of a version that are to be asked."""

    manifest: Manifest
    programs: Mapping[int, Mapping[str, Lookup]]
    """By shard: its programs, by file name."""
    stored: Mapping[int, StoredShard]
    """By shard: its state; none for shards whose programs hold their own."""
    input_hashes: Mapping[str, nn.Module]
    """By file name."""

    def release(self) -> None:
        """Give back the pages of the states, which would otherwise pile up to the size of all shards."""
        for stored in self.stored.values():
            stored.release()

    def overlaid_ids(self, table: str) -> torch.Tensor:
        """Ids of a table that the overlays of a delta move or evict, over all shards that are here: INT64 [N]."""
        parts = [torch.empty(0, dtype=torch.int64)]
        for stored in self.stored.values():
            parts += [stored.overlaid_ids(at) for at, held in enumerate(stored.tables) if held.name == table]
        return torch.cat(parts)

    def check_maps(self) -> None:
        """A map holds as many ids as the manifest says; with every known id found later, it holds no other.

        But in an MPZCH slot whose id is a copy, see ``MapSource.rows_K``, which answers nothing.

        Raises:
            ExportError: One does not.
        """
        for index, stored in self.stored.items():
            for at, table in enumerate(stored.tables):
                if not table.managed:
                    continue
                found, wanted = int(stored.served_ids(at).shape[0]), stored.shard.tables[at].zch_rows
                # Of MPZCH, slots are counted, and an id may lie in several; a delta has it once.
                counted = (
                    found <= wanted
                    if table.remap is Remap.MPZCH and self.manifest.kind is Kind.DELTA
                    else found == wanted
                )
                if not counted:
                    raise ExportError(
                        f"table {table.name}: its map on shard {index} holds {found} ids, the manifest says {wanted}"
                    )


def load_version(directory: Path, manifest: Manifest, shards: Collection[int]) -> LoadedVersion:
    """Load shards of a version back from its files.

    Raises:
        ExportError: A file does not load.
    """
    chosen = sorted(shards)
    try:
        names = {table.input_hash for table in manifest.tables if table.input_hash is not None}
        hashes = {name: load_exported((directory / name).read_bytes()) for name in names}
        if manifest.runtime is Runtime.PYTORCH:
            embedded = {index: {TORCHSCRIPT_FILE: _embedded(shard_dir(directory, index))} for index in chosen}
            return LoadedVersion(manifest=manifest, programs=embedded, stored={}, input_hashes=hashes)
        stored = {index: StoredShard(directory, manifest, index) for index in chosen}
        places = {index: shard_dir(_base_directory(directory, manifest), index) for index in chosen}
        programs = {index: _programs(places[index], stored[index].state) for index in chosen}
    except ExportError:
        raise
    except Exception as exc:  # upstream's loaders raise what they like
        raise ExportError(f"{directory}: its files cannot be loaded: {exc}") from exc
    return LoadedVersion(manifest=manifest, programs=programs, stored=stored, input_hashes=hashes)


def _base_directory(directory: Path, manifest: Manifest) -> Path:
    return directory if manifest.kind is Kind.BASE else directory.parent / str(manifest.base)


def _programs(place: Path, state: list[torch.Tensor]) -> Mapping[str, Lookup]:
    """Both programs of a shard."""
    loaders = {PROGRAM_FILE: _load_exported, TORCHSCRIPT_FILE: _load_torchscript}
    return {file: _lookup(load((place / file).read_bytes()), file, state) for file, load in loaders.items()}


@functools.lru_cache(maxsize=8)
def _load_exported(content: bytes) -> nn.Module:
    """A program holds no state, so shards and versions of one kind share it; loading one takes a second."""
    return load_exported(content)


@functools.lru_cache(maxsize=8)
def _load_torchscript(content: bytes) -> nn.Module:
    return load_torchscript(content)


def portions(manifest: Manifest, shards: Collection[int]) -> list[list[int]]:
    """Shards that may be in memory at a time: all where states are mapped, one where a program holds its own."""
    chosen = sorted(shards)
    return [[index] for index in chosen] if manifest.runtime is Runtime.PYTORCH else [chosen]


def check_clean_process(directory: Path, manifest: Manifest, shards: Collection[int]) -> None:
    """Run the programs of the ``pytorch`` runtime in a process of its own that has imported torch and fbgemm_gpu alone.

    Raises:
        ExportError: One does not run there.
    """
    asked = [
        (str(shard_dir(directory, index) / TORCHSCRIPT_FILE), [int(at == 0) for at in range(len(shard.tables))])
        for index in sorted(shards)
        if (shard := manifest.shards[index]).tables
    ]
    if manifest.runtime is not Runtime.PYTORCH or not asked:
        return
    done = subprocess.run(  # noqa: S603  our own interpreter, our own text
        [sys.executable, "-c", _CLEAN_PROCESS, json.dumps(asked)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        path = (done.stdout.split("\n")[:-1] or [str(directory)])[-1]
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ExportError(f"{path}: a process with torch and fbgemm_gpu alone cannot run it: {last[0]}")


def _embedded(place: Path) -> Lookup:
    return _lookup(torch.jit.load(place / TORCHSCRIPT_FILE), TORCHSCRIPT_FILE, torch.tensor([1]))  # type: ignore[no-untyped-call]


def _lookup(program: nn.Module, file: str, last: torch.Tensor | list[torch.Tensor]) -> Lookup:
    """Ask a program whose third input is ``last``, and hold the shape of its answer against the manifest."""

    def ask(shard: Shard, ids_by_table: Sequence[torch.Tensor]) -> list[Answer]:
        ids_M = torch.cat([*ids_by_table, torch.empty(0, dtype=torch.int64)])
        lengths = [int(ids.shape[0]) for ids in ids_by_table]
        try:
            with torch.no_grad():
                rows, row_ids, hits, *_ = program(ids_M, torch.tensor(lengths, dtype=torch.int64), last)
        except Exception as exc:  # a broken program may raise anything
            raise ExportError(f"shard {shard.index}: {file} fails on {lengths} ids: {exc}") from exc
        units = [entry.width // shard.width for entry in shard.tables]
        sizes = [length * unit for length, unit in zip(lengths, units, strict=True)]
        wanted = ((torch.float32, (sum(sizes), shard.width)), (torch.int64, ids_M.shape), (torch.bool, ids_M.shape))
        for output, (dtype, shape) in zip((rows, row_ids, hits), wanted, strict=True):
            if output.dtype != dtype or tuple(output.shape) != tuple(shape):
                raise ExportError(
                    f"shard {shard.index}: an answer is {output.dtype} {tuple(output.shape)}, not {dtype} {tuple(shape)}"
                )
        parts = zip(rows.split(sizes), row_ids.split(lengths), hits.split(lengths), shard.tables, strict=True)
        return [
            Answer(embeddings_ND=part.reshape(-1, entry.width), row_ids_N=ids, hits_N=hit)
            for part, ids, hit, entry in parts
        ]

    return ask
