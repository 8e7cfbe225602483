"""Owns a version's artifacts loaded back from its files, ready to answer; must not know what the answers should be.

Shape suffixes: N ids of one table, M ids of a request to one shard.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from export.contract import Manifest, Runtime, Shard, shard_dir
from export.contract.layout import PROGRAM_FILE, STATE_FILE, TORCHSCRIPT_FILE
from export.errors import ExportError
from export.mapped import MappedFile, map_safetensors
from export.oracle import Answer
from export.trace import load_exported, load_torchscript

Lookup = Callable[[Shard, Sequence[torch.Tensor]], list[Answer]]
"""(the manifest's entry, ids INT64 of each of its tables) → each table's answer, rows [N, numbers on this shard]."""

_CLEAN_PROCESS = """
import json, sys
import torch, fbgemm_gpu
model = torch.jit.load(sys.argv[1])
rows, row_ids, hits = model(torch.tensor([0]), torch.tensor(json.loads(sys.argv[2])), torch.tensor([1]))
foreign = {name.partition(".")[0] for name in sys.modules} & {"torchrec", "export", "service", "model_repo"}
sys.exit(f"it brought {sorted(foreign)} in" if foreign else 0)
"""
"""Loads a ``model.pt`` where nothing but torch and fbgemm_gpu is imported, and asks it for id 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVersion:
    """The shards of a version that are to be asked."""

    manifest: Manifest
    programs: Mapping[int, Mapping[str, Lookup]]
    """By shard: its programs, by file name."""
    states: Mapping[int, list[torch.Tensor]]
    """By shard, in the order of ``Shard.state``; none for shards that hold their own."""
    input_hashes: Mapping[str, nn.Module]
    """By file name."""
    files: tuple[MappedFile, ...] = ()
    """What the states are mapped from."""

    def release(self) -> None:
        """Give back the pages of the states, which would otherwise pile up to the size of all shards."""
        for file in self.files:
            file.release()

    def check_maps(self) -> None:
        """A map holds as many ids as the manifest says; with every known id found later, it holds no other.

        But in an MPZCH slot whose id is a copy, see ``MapSource.rows_K``, which answers nothing.

        Raises:
            ExportError: One does not.
        """
        for index, state in self.states.items():
            shard = self.manifest.shards[index]
            held = dict(zip(shard.state, state, strict=True))
            maps = [tensor[:, 0] for name, tensor in held.items() if name.endswith(("hash_table", "identities"))]
            found = sum(int((ids != -1).sum()) for ids in maps)
            wanted = sum(entry.zch_rows for entry in shard.tables)
            if maps and found != wanted:
                raise ExportError(f"shard {index}: its map holds {found} ids, the manifest says {wanted}")


def load_version(directory: Path, manifest: Manifest, shards: Collection[int]) -> LoadedVersion:
    """Load shards of a version back from its files.

    Raises:
        ExportError: A file does not load; for the ``pytorch`` runtime, also in a process of its own that has imported
            torch and fbgemm_gpu alone.
    """
    chosen = sorted(shards)
    try:
        names = {table.input_hash for table in manifest.tables if table.input_hash is not None}
        hashes = {name: load_exported((directory / name).read_bytes()) for name in names}
        if manifest.runtime is Runtime.PYTORCH:
            embedded = {index: {TORCHSCRIPT_FILE: _embedded(directory, manifest.shards[index])} for index in chosen}
            return LoadedVersion(manifest=manifest, programs=embedded, states={}, input_hashes=hashes)
        files = {index: MappedFile(shard_dir(directory, index) / STATE_FILE) for index in chosen}
        states = {index: map_safetensors(files[index], manifest.shards[index].state) for index in chosen}
        loaded: dict[str, nn.Module] = {}
        programs = {index: _programs(shard_dir(directory, index), states[index], loaded) for index in chosen}
    except ExportError:
        raise
    except Exception as exc:  # upstream's loaders raise what they like
        raise ExportError(f"{directory}: its files cannot be loaded: {exc}") from exc
    return LoadedVersion(
        manifest=manifest, programs=programs, states=states, input_hashes=hashes, files=tuple(files.values())
    )


def _programs(place: Path, state: list[torch.Tensor], loaded: dict[str, nn.Module]) -> Mapping[str, Lookup]:
    """Both programs of a shard; shards of one kind share what has been loaded."""
    found: dict[str, Lookup] = {}
    for file, load in ((PROGRAM_FILE, load_exported), (TORCHSCRIPT_FILE, load_torchscript)):
        content = (place / file).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if digest not in loaded:
            loaded[digest] = load(content)
        found[file] = _lookup(loaded[digest], file, state)
    return found


def _embedded(directory: Path, shard: Shard) -> Lookup:
    path = shard_dir(directory, shard.index) / TORCHSCRIPT_FILE
    lengths = [int(at == 0) for at in range(len(shard.tables))]
    done = subprocess.run(  # noqa: S603  our own interpreter, our own text
        [sys.executable, "-c", _CLEAN_PROCESS, str(path), json.dumps(lengths)],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode and shard.tables:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ExportError(f"{path}: a process with torch and fbgemm_gpu alone cannot run it: {last[0]}")
    return _lookup(torch.jit.load(path), TORCHSCRIPT_FILE, torch.tensor([1]))  # type: ignore[no-untyped-call]


def _lookup(program: nn.Module, file: str, last: torch.Tensor | list[torch.Tensor]) -> Lookup:
    """Ask a program whose third input is ``last``, and hold the shape of its answer against the manifest."""

    def ask(shard: Shard, ids_by_table: Sequence[torch.Tensor]) -> list[Answer]:
        ids_M = torch.cat([*ids_by_table, torch.empty(0, dtype=torch.int64)])
        lengths = [int(ids.shape[0]) for ids in ids_by_table]
        try:
            with torch.no_grad():
                rows, row_ids, hits = program(ids_M, torch.tensor(lengths, dtype=torch.int64), last)
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
