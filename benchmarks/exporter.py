"""Owns what one rank of the export workload does, under torchrun: writes its part of a checkpoint, or exports its shards.

Leaves its figures in a file of its own. Must not draw anything, nor know what is within bounds.

    python -m torch.distributed.run … -m benchmarks.exporter save|export FOLDER ROWS DIM
"""

import gc
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from export import export_collection
from export.team import Ranks

COLLECTION = "exported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one rank's export took."""

    seconds: float
    """From the first rank's start to the last one's end, imports left out."""
    peak_rss_bytes: int
    """Of the process, from its first moment to its last."""
    written_bytes: int
    """By all write calls of the export."""


def checkpoint_of(folder: Path) -> Path:
    """Where the ranks save."""
    return folder / "checkpoint"


def figures_of(folder: Path, rank: int) -> Figures:
    """What a rank left behind.

    Raises:
        OSError: It left nothing.
    """
    return Figures(**json.loads(_figures_file(folder, rank).read_text(encoding="utf-8")))


def _figures_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def _on_meta(rows: int, dim: int) -> EmbeddingCollection:
    table = EmbeddingConfig(name="big", num_embeddings=rows, embedding_dim=dim, feature_names=["id"])
    return EmbeddingCollection(tables=[table], device=torch.device("meta"))


def _save(folder: Path, rows: int, dim: int) -> None:
    """A row-wise table of random numbers, as a trainer of TorchRec saves it."""
    module = _on_meta(rows, dim)
    sharder = EmbeddingCollectionSharder()
    size = dist.get_world_size()
    plan = construct_module_sharding_plan(
        module,
        {"big": row_wise()},
        sharder=sharder,
        local_size=size,
        world_size=size,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    state = sharder.shard(module, plan, env=env, device=torch.device("cpu")).state_dict()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for shard in state["embeddings.big.weight"].local_shards():
        shard.tensor.detach().uniform_(-1, 1, generator=generator)
    save(state, checkpoint_id=checkpoint_of(folder))


def _export(folder: Path, rows: int, dim: int) -> None:
    with Ranks() as team:
        dist.barrier()
        start_s, before = time.perf_counter(), _written_bytes()
        export_collection(
            _on_meta(rows, dim),
            folder / "repo",
            name=COLLECTION,
            num_shards=team.size,
            checkpoint=checkpoint_of(folder),
            team=team,
        )
        dist.barrier()
        figures = Figures(
            seconds=time.perf_counter() - start_s,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            written_bytes=_written_bytes() - before,
        )
        _figures_file(folder, team.rank).write_text(json.dumps(asdict(figures)), encoding="utf-8")


def _written_bytes() -> int:
    for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines():
        name, _, count = line.partition(": ")
        if name == "wchar":
            return int(count)
    raise AssertionError("the kernel states no wchar")


def main() -> None:
    """Entry point of a rank."""
    step, folder, rows, dim = sys.argv[1:]
    dist.init_process_group("gloo")
    {"save": _save, "export": _export}[step](Path(folder), int(rows), int(dim))
    # A sharded module is a cycle that holds the group: left to the interpreter's end, gloo's threads now and then abort it.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
