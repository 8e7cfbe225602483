"""Owns every knob of the front tier and its defaults; read once by the composition root, passed by constructor."""

import textwrap
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

MIB = 1 << 20
PREFIX = "KJTSERVE_"


class Settings(BaseSettings):
    """Front tier settings; each is also the environment variable ``KJTSERVE_<NAME>``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address that both listeners bind; a container sets 0.0.0.0."""
    http_port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """HTTP port; 0 takes a free one."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 8081
    """gRPC port; 0 takes a free one."""
    max_request_bytes: Annotated[int, Field(gt=0)] = 64 * MIB
    """Largest request body, counted while it streams and again after decompression."""
    max_json_bytes: Annotated[int, Field(gt=0)] = 16 * MIB
    """Largest JSON in a request: reading it takes many times its bytes. Send more ids as binary tensors."""
    max_reply_bytes: Annotated[int, Field(gt=0)] = 512 * MIB
    """Largest reply, predicted from the request before any shard is asked."""
    max_ids: Annotated[int, Field(gt=0)] = 4_000_000
    """Most ids in one request, and most lengths."""
    max_inflight_requests: Annotated[int, Field(gt=0)] = 256
    """Requests worked on at a time; one more gets ``overloaded``."""
    max_reading_requests: Annotated[int, Field(gt=0)] = 1024
    """Requests let in at a time, those whose bodies are still coming included: slow senders take only such a place."""
    max_inflight_bytes: Annotated[int, Field(gt=0)] = 1024 * MIB
    """Bytes that requests admitted at a time may hold: bodies, predicted replies and what answering takes in between. A
    request over what is left gets ``overloaded``; one alone is let in whatever it takes. Calls to shards that nobody waits
    for any more may hold a quarter as much beside it, each shard its share."""
    default_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """Deadline of a request that names none."""
    max_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Cap on the deadline that a client may name."""
    max_batch_ids: Annotated[int, Field(gt=0)] = 131_072
    """Ids that concurrent requests may share in one batch; a larger request is a batch of its own."""
    max_batch_wait_us: Annotated[int, Field(ge=0)] = 0
    """How long a request waits for company. 0: only requests that arrive while a batch is under way share one."""
    offload_ids: Annotated[int, Field(ge=0)] = 2048
    """Batches with more ids than this do their tensor work in threads instead of on the event loop."""
    probe_interval_s: Annotated[float, Field(gt=0)] = 1.0
    """Seconds between two readiness probes of a shard."""
    probe_timeout_s: Annotated[float, Field(gt=0)] = 2.0
    """Deadline of a readiness probe, and of a repair's probe."""
    watch_interval_s: Annotated[float, Field(gt=0)] = 0.2
    """Seconds between two looks for new versions in the repository."""
    preflight_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """How long a new version's probes may go unanswered before the switch is put off."""
    version_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """A version that is not ready on every shard for so long after it was noticed counts as failed; it is tried again."""
    keep_versions: Annotated[int, Field(ge=2)] = 2
    """Versions that answer at a time: the one being served, and those before it, which a rollback goes back to."""
    drain_grace_s: Annotated[float, Field(ge=0)] = 10.0
    """After SIGTERM: the most seconds to finish requests in flight, and then calls to shards that nobody waits for."""
    drain_delay_s: Annotated[float, Field(ge=0)] = 0.0
    """After SIGTERM: seconds to go on accepting with readiness false, so that load balancers notice."""
    log_json: bool = True
    """JSON lines; false: coloured text for a terminal."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is said: debug, info, warning or error."""


def describe_settings() -> str:
    """Every setting for reading: the environment variable with its default, and what it means."""
    parts = []
    for name, field in Settings.model_fields.items():
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        meaning = textwrap.fill(
            " ".join(str(field.description).split()), 100, initial_indent="    ", subsequent_indent="    "
        )
        parts.append(f"{PREFIX}{name.upper()}={default}\n{meaning}")
    return "\n".join(parts)
