"""Owns the front tier's Prometheus metrics: every name, label and bucket boundary in one place.

Label values come from manifests, route names and closed enums, never from a client.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.06, 0.125, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SWITCH_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
BATCH_IDS_BUCKETS = (0, 1, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)


class Metrics:
    """The front tier's metrics on a registry of the caller's.

    Args:
        registry: Where to register; a test passes a fresh one.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.requests = Counter(
            "kjtserve_requests", "Requests answered, by route and outcome code.", ("route", "code"), registry=registry
        )
        self.request_seconds = Histogram(
            "kjtserve_request_seconds",
            "Time from a request's last byte read to its reply handed to the server.",
            ("route",),
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.ids = Counter("kjtserve_ids", "Ids looked up, before dedup.", ("collection", "table"), registry=registry)
        self.unique_ids = Counter(
            "kjtserve_unique_ids", "Ids left after dedup over a batch.", ("collection", "table"), registry=registry
        )
        self.hot_ids = Counter(
            "kjtserve_hot_ids",
            "Unique ids answered by the front tier's hot rows.",
            ("collection", "table"),
            registry=registry,
        )
        self.evictions = Counter(
            "kjtserve_evictions",
            "Ids tombstoned by the versions applied.",
            ("collection", "table"),
            registry=registry,
        )
        self.shard_request_seconds = Histogram(
            "kjtserve_shard_request_seconds",
            "Time of one call to a shard, failures included.",
            ("collection", "shard"),
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.shard_errors = Counter(
            "kjtserve_shard_errors", "Calls to a shard that failed.", ("collection", "shard", "code"), registry=registry
        )
        self.version = Gauge("kjtserve_version", "Version being served.", ("collection",), registry=registry)
        self.version_created = Gauge(
            "kjtserve_version_created_timestamp_seconds",
            "When the version being served was exported, seconds since the epoch.",
            ("collection",),
            registry=registry,
        )
        self.newest_version = Gauge(
            "kjtserve_newest_version", "Newest version in the repository.", ("collection",), registry=registry
        )
        self.version_lag_seconds = Gauge(
            "kjtserve_version_lag_seconds",
            "How long a newer version than the one being served has been in the repository; 0 when there is none.",
            ("collection",),
            registry=registry,
        )
        self.publish_to_served_seconds = Histogram(
            "kjtserve_publish_to_served_seconds",
            "Time from a version's appearance in the repository to its first answer.",
            ("collection",),
            buckets=SWITCH_BUCKETS_S,
            registry=registry,
        )
        self.overlay_bytes = Gauge(
            "kjtserve_overlay_bytes",
            "Bytes of the overlays of the version being served, over all shards; 0 for a base.",
            ("collection",),
            registry=registry,
        )
        self.version_switches = Counter(
            "kjtserve_version_switches",
            "Changes of the version being served.",
            ("collection", "result"),
            registry=registry,
        )
        self.inflight_requests = Gauge(
            "kjtserve_inflight_requests", "Requests admitted and not yet answered.", registry=registry
        )
        self.batch_ids = Histogram(
            "kjtserve_batch_ids", "Ids in a batch, before dedup.", buckets=BATCH_IDS_BUCKETS, registry=registry
        )

    def render(self) -> bytes:
        """The registry in Prometheus' text format."""
        return generate_latest(self._registry)
