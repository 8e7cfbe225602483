"""Owns the metrics of syncing: their names, and a page of their own."""

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from export.contract import UserError

if TYPE_CHECKING:
    from service.sync.syncer import Round


class SyncMetrics:
    """Counts what rounds of syncing did."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.versions = Counter(
            "kjtserve_sync_versions",
            "Versions that were brought, by result; a version that fails is counted each time it is tried.",
            ("collection", "result"),
            registry=self._registry,
        )
        self.bytes = Counter("kjtserve_sync_bytes", "Bytes of the versions that were brought.", registry=self._registry)
        self.newest = Gauge(
            "kjtserve_sync_newest_version",
            "Newest version that was brought since the start.",
            ("collection",),
            registry=self._registry,
        )
        self.source_errors = Counter(
            "kjtserve_sync_source_errors", "Rounds in which the source could not be listed.", registry=self._registry
        )
        self.looked = Gauge(
            "kjtserve_sync_last_round_timestamp_seconds",
            "When the source was last listed, seconds since the epoch.",
            registry=self._registry,
        )

    def serve(self, port: int) -> int:
        """Serve the page on a port, 0 for a free one; returns the port.

        Raises:
            UserError: The port is taken.
        """
        try:
            server, _ = start_http_server(port, registry=self._registry)
        except OSError as exc:
            raise UserError(f"--metrics-port {port}: {exc.strerror}; choose another") from exc
        return int(server.server_port)

    def count(self, done: "Round") -> None:
        """Count a round."""
        self.looked.set(time.time())
        self.bytes.inc(done.bytes)
        for collection, version in done.brought:
            self.versions.labels(collection, "ok").inc()
            self.newest.labels(collection).set(version)
        for collection, _, _ in done.failed:
            self.versions.labels(collection, "failed").inc()

    def unreadable(self) -> None:
        """Count a round that could not list the source."""
        self.source_errors.inc()
