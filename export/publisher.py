"""Owns publishing while a training loop goes on: what changed since the base, every few seconds, beside the steps.

The loop's own thread only takes note of rows, and copies those that may have changed when a version is due. Everything
else is another thread's.
"""

import copy
import dataclasses
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from export.assembly import Base
from export.building import build_version
from export.collection import export_collection
from export.contract import Kind, Manifest, RowDtype
from export.delta import find_base, order_delta
from export.errors import ExportError
from export.maps import evicted_rows
from export.options import Evicted
from export.progress import silent
from export.pruning import prune_versions
from export.reading import read_collection, split_module
from export.rows import TableRows
from export.snapshot import BaseRows, SnapshotRows
from export.source import CollectionSource
from export.team import Alone

_log = logging.getLogger(__name__)

WITNESSES = 64
"""Rows of a table that nobody looked up and that are held against the base at each version."""
_EMPTY = torch.empty(0, dtype=torch.int64)

COMPACT_ROWS = 1 << 20
"""Looked-up rows of a table that are kept as they came before they are made unique."""


class DeltaPublisher:
    """Publishes a module that trains on: deltas every few seconds, and a new base when the overlay has grown.

    Call ``step`` after each optimizer step. Rows that a forward pass in training mode looked up since the base, and those
    that were evicted, are published; with ``rows="all"`` every row is compared, for optimizers that change rows which
    were not looked up (momentum, Adam or weight decay over dense gradients).

    Args:
        module: An unsharded ``EmbeddingCollection`` or ``ManagedCollisionEmbeddingCollection``.
        repo: The model repository.
        name: The collection; a base of it is published at once.
        every: Seconds from one version to the next.
        base_every: Seconds from one base to the next; None: only when the overlay has grown.
        max_overlay: A new base is published when the overlays take this share of the base's state.
        rows: ``touched`` or ``all``.
        keep: How many versions to keep, and the bases that they need; None: all.
        options: Of ``export_collection``, for bases: ``num_shards``, ``plan``, ``row_dtype``, …

    Raises:
        ExportError: The first base cannot be published.
    """

    def __init__(
        self,
        module: nn.Module,
        repo: str | Path,
        *,
        name: str,
        every: float = 5.0,
        base_every: float | None = None,
        max_overlay: float = 0.25,
        rows: str = "touched",
        keep: int | None = 16,
        **options: Any,
    ) -> None:
        if rows not in {"touched", "all"}:
            raise ExportError(f"rows {rows!r}: use touched or all")
        if keep is not None and keep < 1:
            raise ExportError(f"keep {keep}: use a number from 1 on, or None to keep every version")
        self._module, self._repo, self._name = module, Path(repo), name
        self._every, self._base_every, self._max_overlay = every, base_every, max_overlay
        self._all_rows, self._keep, self._options = rows == "all", keep, options
        self._collection, self._collisions = split_module(module)
        self._touched: dict[str, list[torch.Tensor]] = {
            config.name: [_EMPTY] for config in self._collection.embedding_configs()
        }
        self._pending: dict[str, int] = dict.fromkeys(self._touched, 0)
        self._thread: threading.Thread | None = None
        self._rows_of_base: dict[str, tuple[int, BaseRows]] = {}
        """By table: the base's version, and its rows, which take a look at each to find."""
        self._unpublished: Mapping[str, torch.Tensor] | None = None
        self._base: Base = self._publish_base()
        self._based_at = self._due_from = time.monotonic()
        self._hooks = list(self._watch())
        self.published: Manifest = self._base.manifest
        """The newest version that was published."""
        self.failure: Exception | None = None
        """Why the last version was not published; None: it was."""

    def step(self, evicted: Mapping[str, torch.Tensor | None] | None = None) -> None:
        """Take note of a training step, and publish if it is time.

        Args:
            evicted: What ``evict()`` gave, if the loop calls it: rows by table, which the trainer has reset. Evictions of a
                forward pass are noted without it.
        """
        for table, rows in (evicted or {}).items():
            if rows is not None:
                self._note(table, rows)
        if not self.busy and time.monotonic() - self._due_from >= self._every:
            self.publish()

    def publish(self, *, wait: bool = False) -> None:
        """Publish the module as it is now: copies what may have changed, and leaves the rest to a thread.

        What keeps a version from being published is logged and kept in ``failure``; training goes on, and the next
        version holds everything.

        Args:
            wait: Return when the version is published, and raise what kept it from being.

        Raises:
            ExportError: With ``wait``: it was not published.
        """
        self.join()
        self._due_from = time.monotonic()
        grown = self.published.kind is Kind.DELTA and self._overlay_share() > self._max_overlay
        due = self._base_every is not None and self._due_from - self._based_at >= self._base_every
        try:
            snapshot = self._snapshot(rebase=grown or due)
        except Exception as exc:  # noqa: BLE001  training goes on, whatever ails the publishing
            self._failed(exc)
        else:
            self._thread = threading.Thread(target=self._work, args=(snapshot,), name="kjtserve-publisher", daemon=True)
            self._thread.start()
        if wait:
            self.join()
            if self.failure is not None:
                raise self.failure

    @property
    def busy(self) -> bool:
        """Whether a version is being published."""
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        """Wait until nothing is being published."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._unpublished is not None:  # a base that was not published: its rows are still to come
            for table, rows in self._unpublished.items():
                self._note(table, rows)
            self._unpublished = None

    def close(self) -> None:
        """Stop taking note; waits until nothing is being published."""
        self.join()
        for hook in self._hooks:
            hook.remove()

    def _publish_base(self) -> Base:
        manifest = export_collection(self._module, self._repo, name=self._name, **self._options)
        return find_base(self._repo, self._name, manifest.version)

    def _watch(self) -> Any:
        if self._collisions is None:
            yield self._collection.register_forward_pre_hook(self._looked_up, with_kwargs=True)
            return
        for table, collision in self._collisions.items():
            yield collision.register_forward_hook(
                lambda _module, _inputs, output, table=table: self._mapped(table, output)
            )

    def _looked_up(self, module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if module.training:
            features = inputs[0] if inputs else named["features"]
            for config in self._collection.embedding_configs():
                for feature in config.feature_names:
                    self._note(config.name, features[feature].values())

    def _mapped(self, table: str, output: Mapping[str, Any]) -> None:
        assert self._collisions is not None
        collision = self._collisions[table]
        if collision.training:
            for jagged in output.values():
                self._note(table, jagged.values())
            # The unsharded collection's own forward calls evict() next, and nobody sees what it gives.
            for rows in evicted_rows(collision):
                self._note(table, rows)

    def _note(self, table: str, rows: torch.Tensor) -> None:
        # Made unique at once: a view would be of the loop's own buffer, which it may use again.
        noted = torch.unique(rows.detach())
        self._touched[table].append(noted)
        self._pending[table] += noted.numel()
        if self._pending[table] > COMPACT_ROWS:
            self._compact(table)

    def _compact(self, table: str) -> torch.Tensor:
        noted = [rows.to(torch.int64).cpu().reshape(-1) for rows in self._touched[table]]
        rows: torch.Tensor = torch.unique(torch.cat(noted))
        self._touched[table] = [rows]
        self._pending[table] = 0
        return rows

    def _overlay_share(self) -> float:
        base = sum(shard.state_bytes for shard in self.published.shards)
        return sum(shard.overlay_bytes for shard in self.published.shards) / max(base, 1)

    def _snapshot(self, *, rebase: bool) -> "_Snapshot":
        """The module as it is now; of its rows, a copy of those that may have changed since the base."""
        collisions = None
        if self._collisions is not None:
            collisions = {table: _copy_map(collision) for table, collision in self._collisions.items()}
        # Of rows that are stored in fewer bytes, the base does not hold the trainer's numbers.
        over_base = rebase and not self._all_rows and self._base.manifest.tables[0].row_dtype is RowDtype.FP32
        touched: dict[str, torch.Tensor] = {}
        numbers: dict[str, TableRows] = {}
        witnesses: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for config in self._collection.embedding_configs():
            weight = self._collection.embeddings[config.name].weight.detach()
            rows = self._compact(config.name)
            if self._all_rows or (rebase and not over_base):
                rows = torch.arange(config.num_embeddings)
            else:
                rows = torch.unique(torch.cat([rows, self._default_rows(config.name)]))
                drawn = torch.randint(config.num_embeddings, (WITNESSES,))
                drawn = drawn[~torch.isin(drawn, rows)]
                witnesses[config.name] = drawn, _copy(weight, drawn)
            touched[config.name] = rows
            numbers[config.name] = SnapshotRows(
                table=config.name,
                rows=config.num_embeddings,
                dim=config.embedding_dim,
                held=rows,
                numbers=_copy(weight, rows),
                base=self._base_rows(config.name) if over_base else None,
            )
        source = read_collection(self._module, evicted=Evicted.REFUSE, collisions=collisions, numbers=numbers)
        if rebase:
            self._based_at = self._due_from
            self._touched = {table: [_EMPTY] for table in self._touched}
            self._pending = dict.fromkeys(self._touched, 0)
        return _Snapshot(source=source, touched=touched, witnesses=witnesses, rebase=rebase)

    def _default_rows(self, table: str) -> torch.Tensor:
        """Rows that unknown ids of a managed table are answered with."""
        training = self._base.manifest.table(table).training
        return _EMPTY if training is None else torch.tensor(training.row_edges[1:]) - 1

    def _base_rows(self, table: str) -> BaseRows:
        base = self._base
        version, rows = self._rows_of_base.get(table, (0, None))
        if rows is None or version != base.manifest.version:
            rows = BaseRows(base.directory, base.manifest, table)
            self._rows_of_base[table] = base.manifest.version, rows
        return rows

    def _work(self, snapshot: "_Snapshot") -> None:
        try:
            self._check_witnesses(snapshot)
            touched = None if self._all_rows else snapshot.touched
            order = order_delta(snapshot.source, dataclasses.replace(self._base, touched=touched))
            if snapshot.rebase:
                order = dataclasses.replace(order, base=None)
            manifest = build_version(
                self._repo, order, None, team=Alone(), shards=range(order.num_shards), on_progress=silent
            )
            if snapshot.rebase:
                self._base = find_base(self._repo, self._name, manifest.version)
            self.published, self.failure = manifest, None
        except Exception as exc:  # noqa: BLE001  training goes on, whatever ails the publishing
            self._unpublished = snapshot.touched if snapshot.rebase else None
            self._failed(exc)
            return
        if self._keep is not None:
            try:
                prune_versions(self._repo, self._name, self._keep)
            except Exception:  # noqa: BLE001  the version is out; what is too much is removed after the next
                _log.exception("%s: old versions were not removed", self._name)

    def _check_witnesses(self, snapshot: "_Snapshot") -> None:
        """Some rows that nobody looked up must be the base's still."""
        if self._base.manifest.tables[0].row_dtype is not RowDtype.FP32:
            return
        for table, (rows, numbers) in snapshot.witnesses.items():
            base = self._base_rows(table)
            held = base.holds(rows)
            differs = (base.gather(rows[held]).view(torch.int32) != numbers[held].view(torch.int32)).any(dim=1)
            if bool(differs.any()):
                raise ExportError(
                    f"table {table}: row {int(rows[held][differs][0])} changed since the base, and was neither looked up nor "
                    "named by evict(): pass what evict() gives to step(); if the optimizer changes rows that were not "
                    "looked up, publish with rows='all'"
                )

    def _failed(self, exc: Exception) -> None:
        self.failure = exc
        _log.error("%s: no version was published: %s", self._name, exc, exc_info=not isinstance(exc, ExportError))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """A module as it was at one step."""

    source: CollectionSource
    touched: Mapping[str, torch.Tensor]
    """By table: the rows that were copied."""
    witnesses: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """By table: some rows that were not looked up, and their numbers."""
    rebase: bool


def _copy(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return weight.index_select(0, rows.to(weight.device)).float().cpu()


def _copy_map(collision: nn.Module) -> nn.Module:
    copied = copy.deepcopy(collision)
    copied._forward_hooks.clear()
    return copied
