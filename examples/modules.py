"""Owns the two sample modules: how they are built, and how they are saved and loaded. Must not train them.

Saved is a state dict in safetensors with the configuration beside it as JSON, so that loading runs nobody's code.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

DEFAULT_FOLDER = Path(__file__).parent.parent / "build-output" / "sample"
FOLDER_VARIABLE = "KJTSERVE_SAMPLE_DIR"

CONFIG_FILE = "config.json"
STATE_FILE = "managed.safetensors"
PLAIN_STATE_FILE = "plain.safetensors"
IDS_FILE = "known_ids.json"

POLICIES = {"DistanceLFU": DistanceLFU_EvictionPolicy, "LRU": LRU_EvictionPolicy}


@dataclass(kw_only=True, slots=True, frozen=True)
class SampleConfig:
    """What has to be known to build the modules that a saved state fits into."""

    dim: int = 32
    """Embedding dimension of every table."""
    user_rows: int = 2048
    """``zch_size`` of the user table: far fewer than the log's users, so that the map evicts."""
    item_rows: int = 1536
    """``zch_size`` of the item table."""
    eviction_interval: int = 8
    """Steps between two updates of a map."""
    bucket_rows: int = 1009
    """Rows of the plain item table; an item's row is its unsigned id modulo this prime."""
    hour_rows: int = 168
    """Rows of the plain hour-of-week table."""


def sample_folder(path: Path | None = None) -> Path:
    """Folder of the saved sample: ``path``, else the environment's ``KJTSERVE_SAMPLE_DIR``, else build-output/sample."""
    if path is not None:
        return path
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else DEFAULT_FOLDER


def _table(name: str, rows: int, dim: int) -> EmbeddingConfig:
    return EmbeddingConfig(name=f"{name}_table", num_embeddings=rows, embedding_dim=dim, feature_names=[name])


def build_managed(config: SampleConfig) -> ManagedCollisionEmbeddingCollection:
    """Build the untrained MC-EC: tables ``user_table`` (DistanceLFU) and ``item_table`` (LRU), features user and item."""
    tables = [
        (_table("user", config.user_rows, config.dim), "DistanceLFU"),
        (_table("item", config.item_rows, config.dim), "LRU"),
    ]
    device = torch.device("cpu")
    maps = {
        table.name: MCHManagedCollisionModule(
            name=table.name,
            zch_size=table.num_embeddings,
            device=device,
            eviction_policy=POLICIES[policy](),
            eviction_interval=config.eviction_interval,
        )
        for table, policy in tables
    }
    configs = [table for table, _ in tables]
    return ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=configs, device=device), ManagedCollisionCollection(maps, configs)
    )


def build_plain(config: SampleConfig) -> EmbeddingCollection:
    """Build the untrained EC: tables ``bucket_table`` and ``hour_table``, features bucket and hour, ids are rows."""
    tables = [_table("bucket", config.bucket_rows, config.dim), _table("hour", config.hour_rows, config.dim)]
    return EmbeddingCollection(tables=tables, device=torch.device("cpu"))


def map_of(module: ManagedCollisionEmbeddingCollection, table: str) -> MCHManagedCollisionModule:
    """Return the managed-collision module of one table."""
    found = module._managed_collision_collection._managed_collision_modules[table]
    if not isinstance(found, MCHManagedCollisionModule):
        raise TypeError(
            f"table {table}: its map is a {type(found).__name__}, the sample reads MCHManagedCollisionModule"
        )
    return found


def mapped_ids(module: ManagedCollisionEmbeddingCollection, table: str) -> set[int]:
    """Return the ids that hold a row of ``table`` now; the empty-slot marker (int64 max) is left out."""
    ids = map_of(module, table)._mch_sorted_raw_ids
    return set(ids[ids != torch.iinfo(torch.int64).max].tolist())


def _save_json(document: dict[str, object], path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _save_state(module: nn.Module, path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    save_file({name: value.detach().contiguous() for name, value in module.state_dict().items()}, partial)
    partial.replace(path)


def save_sample(
    folder: Path,
    *,
    config: SampleConfig,
    managed: ManagedCollisionEmbeddingCollection,
    plain: EmbeddingCollection,
    ids: dict[str, object],
) -> None:
    """Write both modules, their configuration and the summary of ids into ``folder``; the configuration comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    _save_state(managed, folder / STATE_FILE)
    _save_state(plain, folder / PLAIN_STATE_FILE)
    _save_json(ids, folder / IDS_FILE)
    _save_json(asdict(config), folder / CONFIG_FILE)


def _saved_config(folder: Path) -> SampleConfig:
    try:
        text = (folder / CONFIG_FILE).read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        raise FileNotFoundError(
            f"{folder}: holds no trained sample ({CONFIG_FILE} is missing); run `python -m examples.train`, "
            f"or point {FOLDER_VARIABLE} at the folder it wrote"
        ) from exc
    return SampleConfig(**json.loads(text))


def load(path: Path | None = None) -> ManagedCollisionEmbeddingCollection:
    """Load the trained MC-EC in eval mode, rows and maps as they were saved.

    Args:
        path: Folder that ``python -m examples.train`` wrote; see ``sample_folder`` for the default.

    Raises:
        FileNotFoundError: Nothing is saved there; the message says what to run.
    """
    folder = sample_folder(path)
    module = build_managed(_saved_config(folder))
    module.load_state_dict(load_file(folder / STATE_FILE))
    return module.eval()


def plain(path: Path | None = None) -> EmbeddingCollection:
    """Load the trained plain EC in eval mode; arguments and errors as for ``load``."""
    folder = sample_folder(path)
    module = build_plain(_saved_config(folder))
    module.load_state_dict(load_file(folder / PLAIN_STATE_FILE))
    return module.eval()
