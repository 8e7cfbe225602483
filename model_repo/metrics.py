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
from model_repo.shard import LoadedShard

FLUSH_INTERVAL_S = 0.02
"""Least time between two hand-overs: how far the metrics page may lag behind the answers."""

GAUGE_INTERVAL_S = 5.0
"""While it answers, a version states its gauges this often: of two loaded versions, the one in use has the last word."""

# Families of one name are shared by all models of a server, and their help texts must agree.
REMAP_IDS = ("kjtserve_remap_ids_total", "Ids that shards looked up, by table and outcome.")
ZCH_OPEN_SLOTS = ("kjtserve_zch_open_slots", "Open slots of a managed-collision table, this shard's share.")
ZCH_ROWS = ("kjtserve_zch_rows", "Ids in a managed-collision table's map, this shard's share.")


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
        self._counters: list[tuple[Any, Any]] = []
        self._gauges: list[tuple[Any, int]] = []
        self._counted: list[bool] = [_counts(table, shard.shard.index) for table in shard.tables]
        for table, entry, counted in zip(shard.tables, shard.shard.tables, self._counted, strict=True):
            if not counted:
                continue
            labels = {"collection": shard.collection, "shard": str(shard.shard.index), "table": table.name}
            mapped = table.remap is not Remap.NONE
            outcomes = ("unknown" if mapped else "out_of_range", "hit")
            miss, hit = (self._remap_ids.Metric(labels={**labels, "outcome": outcome}) for outcome in outcomes)
            self._counters.append((miss, hit))
            if mapped:
                self._gauges.append((self._open_slots.Metric(labels=labels), entry.zch_open_slots))
                self._gauges.append((self._rows.Metric(labels=labels), entry.zch_rows))
        self._set_gauges()
        self._pending_T2 = np.zeros((len(self._counters), 2), dtype=np.int64)
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kjtserve-metrics", daemon=True)
        self._thread.start()

    def count(self, hits_N: NDArray[np.bool_], table_lengths_T: Sequence[int]) -> None:
        """Count the ids of one answered request, by table and outcome."""
        counts_T2 = np.empty_like(self._pending_T2)
        start, at = 0, 0
        for counted, length in zip(self._counted, table_lengths_T, strict=True):
            if counted:
                hits = np.count_nonzero(hits_N[start : start + length])
                counts_T2[at] = length - hits, hits
                at += 1
            start += length
        with self._lock:
            self._pending_T2 += counts_T2
        self._work.set()

    def close(self) -> None:
        """Hand over what is left and end the thread."""
        self._stop.set()
        self._work.set()
        self._thread.join(timeout=2.0)

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
            counts_T2, self._pending_T2 = self._pending_T2, np.zeros_like(self._pending_T2)
        for metrics, counts in zip(self._counters, counts_T2.tolist(), strict=True):
            for metric, count in zip(metrics, counts, strict=True):
                if count:
                    metric.increment(count)
        if counts_T2.any() and time.monotonic() - self._gauges_set_s > GAUGE_INTERVAL_S:
            self._set_gauges()

    def _set_gauges(self) -> None:
        for metric, value in self._gauges:
            metric.set(value)
        self._gauges_set_s = time.monotonic()
