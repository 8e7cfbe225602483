"""Owns the training of the sample collection: ``python -m examples.train``. Must not know how anything is served.

Streams the event log in its own order through a real managed-collision collection, so that its maps fill, evict and
move on as they do in production, and takes one optimisation step a batch. ``load`` and ``plain`` are the factories for
``kjtserve export``.

Shape suffixes: N events of a batch, D embedding dimension.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.events import Events, hash_id, read_events
from examples.modules import (
    FOLDER_VARIABLE,
    SampleConfig,
    build_managed,
    build_plain,
    load,
    map_of,
    mapped_ids,
    plain,
    sample_folder,
    save_sample,
)

__all__ = ["Trained", "hash_id", "load", "main", "plain", "train"]

BATCH_EVENTS = 256
LEARNING_RATE = 0.1
RATING_CENTRE = 5.0
"""Half of the scale, taken from every rating so that rows start near their target."""
SEED = 20130228
"""Day of the log's first event; any fixed number would do."""
IDS_LISTED = 20
"""Known, evicted and never-seen ids listed for each table."""


@dataclass(kw_only=True, slots=True)
class MapHistory:
    """What happened to one table's map over the run."""

    current: set[int] = field(default_factory=set)
    """Ids that hold a row now."""
    ever: set[int] = field(default_factory=set)
    """Ids that held a row at any time."""
    evictions: int = 0
    """Times an id lost its row to another id."""

    def record(self, ids: set[int]) -> None:
        """Take note of the ids that hold a row after a step."""
        self.evictions += len(self.current - ids)
        self.current = ids
        self.ever |= ids

    @property
    def evicted(self) -> set[int]:
        """Ids that held a row once and hold none now."""
        return self.ever - self.current


@dataclass(kw_only=True, slots=True)
class Trained:
    """Result of a run; both modules are in eval mode."""

    config: SampleConfig
    managed: ManagedCollisionEmbeddingCollection
    plain: EmbeddingCollection
    maps: dict[str, MapHistory]
    """By table name."""
    reset_rows: int
    """Rows that were given back their initial distribution, first use included."""
    losses: list[float]
    """Mean squared error of the managed collection's batch, one a step."""


def batch_kjt(features: dict[str, torch.Tensor]) -> KeyedJaggedTensor:
    """Pack one id a sample and feature, INT64 [N] each, as a KeyedJaggedTensor."""
    num_events = len(next(iter(features.values())))
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.cat(list(features.values())),
        lengths=torch.ones(len(features) * num_events, dtype=torch.int32),
    )


@torch.no_grad()
def reset_evicted_rows(
    module: ManagedCollisionEmbeddingCollection,
    evictions: dict[str, torch.Tensor | None],
    optimizer: torch.optim.Optimizer,
) -> int:
    """Give rows that changed hands a fresh start: the table's own initialiser, and no optimizer state.

    What TorchRec's sharded trainer does between remap and lookup
    (``torchrec.distributed.mc_embedding_modules.BaseShardedManagedCollisionEmbeddingCollection._evict``); the unsharded
    module's own ``evict`` resets nothing, and an id would start with the row of the id that it displaced.

    Returns:
        The number of rows reset.
    """
    num_rows = 0
    embeddings = module._embedding_collection
    for config in embeddings.embedding_configs():
        rows = evictions[config.name]
        if rows is None or not rows.numel():
            continue
        weight = embeddings.embeddings[config.name].weight
        fresh = torch.empty(rows.numel(), config.embedding_dim)
        if config.init_fn is None:
            raise TypeError(f"table {config.name}: has no init_fn, TorchRec's EmbeddingConfig sets one")
        config.init_fn(fresh)
        weight[rows] = fresh
        for name, state in optimizer.state[weight].items():
            if name != "step":
                state[rows] = 0
        num_rows += rows.numel()
    return num_rows


def _step(
    module: nn.Module, optimizer: torch.optim.Optimizer, kjt: KeyedJaggedTensor, targets_N: torch.Tensor
) -> float:
    """Take one step on the squared error between the target and the dot product of a sample's embeddings."""
    optimizer.zero_grad()
    found = module(kjt)
    left_ND, right_ND = ((found[0] if isinstance(found, tuple) else found)[key].values() for key in kjt.keys())  # noqa: SIM118 - a KJT is no dict
    loss = torch.nn.functional.mse_loss((left_ND * right_ND).sum(dim=1), targets_N)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


@dataclass(kw_only=True, slots=True, frozen=True)
class Batch:
    """One step's input for both modules."""

    managed: KeyedJaggedTensor
    plain: KeyedJaggedTensor
    targets: torch.Tensor
    """FP32 [N], ratings less ``RATING_CENTRE``."""


def batches(events: Events, config: SampleConfig) -> Iterator[Batch]:
    """Cut the log, in its own order, into batches of ``BATCH_EVENTS``; the last one may be short."""
    users_N = torch.tensor([hash_id(key) for key in events.users])
    items_N = torch.tensor([hash_id(key) for key in events.items])
    # torch.remainder takes the divisor's sign, so that a negative id gets a row as well
    buckets_N = torch.remainder(items_N, config.bucket_rows)
    hours_N = torch.remainder(events.times // 3600, config.hour_rows)
    for start in range(0, len(events), BATCH_EVENTS):
        part = slice(start, start + BATCH_EVENTS)
        yield Batch(
            managed=batch_kjt({"user": users_N[part], "item": items_N[part]}),
            plain=batch_kjt({"bucket": buckets_N[part], "hour": hours_N[part]}),
            targets=events.ratings[part] - RATING_CENTRE,
        )


def train(
    events: Events,
    config: SampleConfig | None = None,
    *,
    seed: int = SEED,
    advance: Callable[[int], None] = lambda _: None,
) -> Trained:
    """Stream the events once through both modules.

    The same arguments give the same bits; torch's global generator is left as it was.

    Args:
        events: The log, oldest first.
        config: Sizes; the defaults suit the bundled log.
        seed: Of the initial rows and of every reset row.
        advance: Called after each step with the number of events it took.

    Returns:
        The modules in eval mode, every eviction consumed, with what happened to their maps.
    """
    config = config or SampleConfig()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        managed, plain_module = build_managed(config).train(), build_plain(config).train()
        optimizer = torch.optim.Adagrad(managed.parameters(), lr=LEARNING_RATE)
        plain_optimizer = torch.optim.Adagrad(plain_module.parameters(), lr=LEARNING_RATE)
        maps = {table.name: MapHistory() for table in managed._embedding_collection.embedding_configs()}
        result = Trained(config=config, managed=managed, plain=plain_module, maps=maps, reset_rows=0, losses=[])

        def consume_evictions(maps_module: ManagedCollisionCollection, _inputs: object, _remapped: object) -> None:
            evictions = maps_module.evict()
            result.reset_rows += reset_evicted_rows(managed, evictions, optimizer)
            for table, rows in evictions.items():
                if rows is not None:
                    maps[table].record(mapped_ids(managed, table))

        # between remap and lookup, where the sharded trainer does it: the step that admits an id reads its new row
        hook = managed._managed_collision_collection.register_forward_hook(consume_evictions)
        for batch in batches(events, config):
            result.losses.append(_step(managed, optimizer, batch.managed, batch.targets))
            _step(plain_module, plain_optimizer, batch.plain, batch.targets)
            advance(len(batch.targets))
        hook.remove()
    managed.eval()
    plain_module.eval()
    return result


def list_ids(trained: Trained, events: Events) -> dict[str, object]:
    """Summarise a run for demos and tests: some known, evicted and never-seen keys of each table, with their ids.

    Each list holds ``{"key": the string, "id": its 64-bit id}`` and is sorted by key; ids need a reader that keeps 64
    bits (Python's does, JavaScript's does not).
    """
    summary: dict[str, object] = {}
    for feature, keys in (("user", events.users), ("item", events.items)):
        history = trained.maps[f"{feature}_table"]
        id_of = {key: hash_id(key) for key in sorted(set(keys))}
        width = len(keys[0])
        unseen = (f"{number:0{width}d}" for number in range(10**width - 1, 0, -1))
        chosen = {
            "known": [key for key, raw_id in id_of.items() if raw_id in history.current],
            "evicted": [key for key, raw_id in id_of.items() if raw_id in history.evicted],
            "never_seen": [
                key for _, key in zip(range(IDS_LISTED), (k for k in unseen if k not in id_of), strict=False)
            ],
        }
        summary[f"{feature}_table"] = {
            "feature": feature,
            "distinct_ids": len(id_of),
            "mapped_ids": len(history.current),
            "evictions": history.evictions,
            **{kind: [{"key": key, "id": hash_id(key)} for key in some[:IDS_LISTED]] for kind, some in chosen.items()},
        }
    return summary


def _report(trained: Trained, events: Events, console: Console) -> None:
    table = Table(title=f"{len(events):,} events, {len(trained.losses)} steps")
    for heading in ("table", "policy", "ids", "rows", "mapped", "evictions", "out now"):
        table.add_column(heading, justify="left" if heading in {"table", "policy"} else "right")
    for (name, history), keys in zip(trained.maps.items(), (events.users, events.items), strict=True):
        policy = type(map_of(trained.managed, name)._eviction_policy).__name__.removesuffix("_EvictionPolicy")
        numbers = (
            len(set(keys)),
            map_of(trained.managed, name).output_size(),
            len(history.current),
            history.evictions,
            len(history.evicted),
        )
        table.add_row(name, policy, *(f"{number:,}" for number in numbers))
    console.print(table)
    ends = sum(trained.losses[:10]) / len(trained.losses[:10]), sum(trained.losses[-10:]) / len(trained.losses[-10:])
    console.print(f"squared error {ends[0]:.3f} → {ends[1]:.3f}; {trained.reset_rows:,} rows reset")


def main(
    out: Annotated[
        Path | None, typer.Option(help=f"Folder to write. Default: ${FOLDER_VARIABLE}, else build-output/sample.")
    ] = None,
    events: Annotated[int | None, typer.Option(min=1, help="Use only the first EVENTS events of the log.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial rows.")] = SEED,
) -> None:
    """Train the sample collection on the bundled event log and save it."""
    # Building a KeyedJaggedTensor makes torch log advice about tracing that no user of a command can act on.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    console = Console(stderr=True)
    folder = sample_folder(out)
    log = read_events(limit=events)
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=len(log))
        trained = train(log, seed=seed, advance=lambda num_events: progress.advance(task, num_events))
    save_sample(folder, config=trained.config, managed=trained.managed, plain=trained.plain, ids=list_ids(trained, log))
    _report(trained, log, console)
    print(folder)


if __name__ == "__main__":
    typer.run(main)
