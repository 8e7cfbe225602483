"""Owns a shard's metrics on Triton's metrics port: names, labels, and when they are handed over.

Each operation on a Triton metric is a message to the server's process and back, about 70 µs. A request only adds to
counts in this process; a thread hands them over, at most every ``FLUSH_INTERVAL_S``.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.contract import Remap, Routing, Table
from model_repo.shard import Answer, LoadedShard, ShardVersion

FLUSH_INTERVAL_S = 0.02
"""Least time between two hand-overs: how far the metrics page may lag behind the answers."""

GAUGE_INTERVAL_S = 5.0
"""While it answers, a base states its gauges this often: of two loaded bases, the one in use has the last word."""

# Families of one name are shared by all models of a server, and their help texts must agree.
REMAP_IDS = ("kjtserve_remap_ids_total", "Ids that shards looked up, by table and outcome.")
ZCH_OPEN_SLOTS = ("kjtserve_zch_open_slots", "Open slots of a managed-collision table, this shard's share.")
ZCH_ROWS = ("kjtserve_zch_rows", "Ids in a managed-collision table's map, this shard's share.")


OUTCOMES = ("unknown", "hit", "overlay", "evicted")
"""What became of an id: no row of its own; a row of the base; a row that is new or changed in a delta; a row that it lost
in a delta, so that it answers as an unknown one."""
PLAIN_OUTCOMES = ("out_of_range", "hit", "overlay")
"""The same of a plain table, which evicts nothing."""


def _counts(table: Table, shard: int) -> bool:
    """Whether a shard counts a table's ids: every holder of columns is asked all of them, and they are counted once."""
    return table.routing is not Routing.COLUMNS or table.placements[0].shard == shard


class ShardMetrics:
    """The metrics of one shard; every series exists, at 0, once this object does.

    Args:
        backend: Triton's ``triton_python_backend_utils``.
        shard: Whose ids are counted.
    """

    def __init__(self, backend: Any, shard: LoadedShard) -> None:
        self._backend = backend
        family = backend.MetricFamily
        # Triton wants the families to outlive their metrics.
        self._remap_ids = family(name=REMAP_IDS[0], description=REMAP_IDS[1], kind=family.COUNTER)
        self._open_slots = family(name=ZCH_OPEN_SLOTS[0], description=ZCH_OPEN_SLOTS[1], kind=family.GAUGE)
        self._rows = family(name=ZCH_ROWS[0], description=ZCH_ROWS[1], kind=family.GAUGE)
        self._counters: list[tuple[Any, ...]] = []
        self._gauges: list[tuple[int, Any, Any]] = []
        self._counted: list[bool] = [_counts(table, shard.shard.index) for table in shard.tables]
        for at, (table, counted) in enumerate(zip(shard.tables, self._counted, strict=True)):
            if not counted:
                continue
            labels = {"collection": shard.collection, "shard": str(shard.shard.index), "table": table.name}
            mapped = table.remap is not Remap.NONE
            outcomes = OUTCOMES if mapped else PLAIN_OUTCOMES
            self._counters.append(
                tuple(self._remap_ids.Metric(labels={**labels, "outcome": outcome}) for outcome in outcomes)
            )
            if mapped:
                self._gauges.append((at, self._open_slots.Metric(labels=labels), self._rows.Metric(labels=labels)))
        self._in_use = shard.base
        self._set_gauges(shard.base)
        self._pending_TO = self._no_counts()
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kjtserve-metrics", daemon=True)
        self._thread.start()

    def count(self, version: ShardVersion, answer: Answer, table_lengths_T: Sequence[int]) -> None:
        """Count the ids of one answered request, by table and outcome; its version is the one in use from now on.

        A request for no ids, by which a server is tried out, is no use of its version.
        """
        if not any(table_lengths_T):
            return
        hits_N, overlaid_N = answer.hits_N.numpy(), answer.overlaid_N.numpy()
        counts_TO = self._no_counts()
        start, at = 0, 0
        for counted, length in zip(self._counted, table_lengths_T, strict=True):
            if counted:
                part = slice(start, start + length)
                counts_TO[at] = count_outcomes(hits_N[part], overlaid_N[part])
                at += 1
            start += length
        with self._lock:
            self._pending_TO += counts_TO
            self._in_use = version
        self._work.set()

    def close(self) -> None:
        """Hand over what is left and end the thread."""
        self._stop.set()
        self._work.set()
        self._thread.join(timeout=2.0)

    def _no_counts(self) -> NDArray[np.int64]:
        return np.zeros((len(self._counters), len(OUTCOMES)), dtype=np.int64)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._work.wait()
            self._work.clear()
            try:
                self._flush()
            except Exception as exc:  # noqa: BLE001 - the server's trouble with a metric must not end the counting
                self._backend.Logger.log_warn(f"kjtserve: counts were lost: {exc}")
            self._stop.wait(FLUSH_INTERVAL_S)
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            counts_TO, self._pending_TO = self._pending_TO, self._no_counts()
            in_use = self._in_use
        for metrics, counts in zip(self._counters, counts_TO.tolist(), strict=True):
            for metric, count in zip(metrics, counts, strict=False):
                if count:
                    metric.increment(count)
        stale = time.monotonic() - self._gauges_set_s > GAUGE_INTERVAL_S
        if in_use is not self._shown or (stale and counts_TO.any()):
            self._set_gauges(in_use)

    def _set_gauges(self, version: ShardVersion) -> None:
        for at, open_slots, rows in self._gauges:
            entry = version.shard.tables[at]
            open_slots.set(entry.zch_open_slots)
            rows.set(entry.zch_rows)
        self._shown = version
        self._gauges_set_s = time.monotonic()


def count_outcomes(hits_N: NDArray[np.bool_], overlaid_N: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """How many ids had each of ``OUTCOMES``."""
    overlaid = int(np.count_nonzero(overlaid_N))
    hits = int(np.count_nonzero(hits_N))
    overlay = int(np.count_nonzero(hits_N & overlaid_N)) if overlaid else 0
    evicted = overlaid - overlay
    return hits_N.size - hits - evicted, hits - overlay, overlay, evicted
