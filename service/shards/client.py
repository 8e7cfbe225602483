"""Owns one call to one shard over the wire; must not know routing, batches or the edges.

Triton is spoken to through the KServe v2 gRPC stubs that tritonclient ships, without tritonclient's own client: that
one copies every tensor twice and hides cancellation.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from service.errors import ErrorCode

CHANNEL_OPTIONS = (
    # Size is bounded before fan-out, by the predicted reply; a second, smaller limit here would only break large ones.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)

_DEAD_STUB = "Stub process"
"""What Triton 2.51 says of a Python backend process that died; it never restarts one by itself."""

_CODES = {
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.INTERNAL,  # the front tier built the request: its bug, not the client's
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorCode.OVERLOADED,
}
"""Everything else is a shard that does not answer: ``unavailable``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRequest:
    """Ids for one shard, grouped by table in the order of the manifest's ``Shard.tables``."""

    model: str
    base: int
    """Triton's model version: the base that holds the rows."""
    version: int
    """The version to answer from; equal to ``base`` unless it is a delta on it."""
    ids_N: NDArray[np.int64]
    table_lengths_T: NDArray[np.int64]
    want_row_ids: bool = False
    want_hits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReply:
    """Rows for the ids of a request, in its order; read-only views of the received message."""

    embeddings_ND: NDArray[np.float32]
    row_ids_N: NDArray[np.int64] | None = None
    hits_N: NDArray[np.bool_] | None = None


class ShardFailed(Exception):
    """A shard did not answer a call.

    Attributes:
        code: In the front tier's terms.
        process_died: The shard's server lives, but its model process does not, and will not come back by itself.
    """

    def __init__(self, message: str, *, code: ErrorCode = ErrorCode.UNAVAILABLE, process_died: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.process_died = process_died


class ShardClient(Protocol):
    """One shard, wherever it runs."""

    async def lookup(self, request: ShardRequest, *, timeout_s: float) -> ShardReply:
        """Ask for rows; raises ``ShardFailed``. Cancelling the call cancels it on the shard."""
        ...

    async def close(self) -> None:
        """Let go of the connection."""
        ...


class GrpcShardClient:
    """A shard hosted by a Triton that is reached over gRPC.

    Args:
        address: ``HOST:PORT`` of Triton's gRPC service. A DNS name with several addresses is balanced round robin.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        options = [*CHANNEL_OPTIONS, ("grpc.lb_policy_name", "round_robin")]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def lookup(self, request: ShardRequest, *, timeout_s: float) -> ShardReply:
        """See ``ShardClient.lookup``."""
        try:
            response = await self._stub.ModelInfer(_encode(request), timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise _translate(exc, self.address, timeout_s) from exc
        return _decode(response, request)

    async def close(self) -> None:
        """See ``ShardClient.close``."""
        await self._channel.close()


def _encode(request: ShardRequest) -> Any:
    version = np.array([request.version], dtype=np.int64)
    tensors = (("ids", request.ids_N), ("table_lengths", request.table_lengths_T), ("version", version))
    message = service_pb2.ModelInferRequest(model_name=request.model, model_version=str(request.base))
    for name, array in tensors:
        message.inputs.add(name=name, datatype="INT64", shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    message.outputs.add(name="embeddings")
    if request.want_row_ids:
        message.outputs.add(name="row_ids")
    if request.want_hits:
        message.outputs.add(name="hits")
    return message


def _decode(response: Any, request: ShardRequest) -> ShardReply:
    """Read the arrays off a response, and hold them against what was asked: a shard is another process."""
    n = request.ids_N.size
    arrays = {
        output.name: (tuple(output.shape), content)
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    try:
        shape, content = arrays["embeddings"]
        embeddings_ND = np.frombuffer(content, dtype=np.float32).reshape(shape)
        row_ids_N = np.frombuffer(arrays["row_ids"][1], dtype=np.int64) if request.want_row_ids else None
        hits_N = np.frombuffer(arrays["hits"][1], dtype=np.bool_) if request.want_hits else None
    except (KeyError, ValueError) as exc:
        raise ShardFailed(f"reply is malformed: {exc!r}", code=ErrorCode.INTERNAL) from exc
    sizes = {array.shape[0] for array in (embeddings_ND, row_ids_N, hits_N) if array is not None}
    if sizes != {n}:
        raise ShardFailed(f"reply has {sorted(sizes)} rows, {n} were asked for", code=ErrorCode.INTERNAL)
    return ShardReply(embeddings_ND=embeddings_ND, row_ids_N=row_ids_N, hits_N=hits_N)


def _translate(exc: grpc.aio.AioRpcError, address: str, timeout_s: float) -> ShardFailed:
    """The one place where gRPC's errors towards shards become ours."""
    status, details = exc.code(), exc.details() or ""
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ShardFailed(f"{address} did not answer in {timeout_s:.3f} s", code=ErrorCode.DEADLINE_EXCEEDED)
    return ShardFailed(
        f"{address} answered {status.name}: {details}",
        code=_CODES.get(status, ErrorCode.UNAVAILABLE),
        process_died=_DEAD_STUB in details,
    )
