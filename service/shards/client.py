"""Owns one call to one shard over the wire; must not know routing, batches or the edges.

Triton is spoken to in the KServe v2 messages that tritonclient ships, without tritonclient's own client: that one copies
every tensor twice and hides cancellation.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from export.contract import PROBE_ID
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

_INFER = "/inference.GRPCInferenceService/ModelInfer"

_DEAD_STUB = "Stub process"
"""What Triton 2.51 says of a Python backend process that died; it never restarts one by itself."""

_CODES = {
    grpc.StatusCode.DEADLINE_EXCEEDED: (ErrorCode.DEADLINE_EXCEEDED, "it gave the request up as too late"),
    # The front tier built the request: its bug, not the client's.
    grpc.StatusCode.INVALID_ARGUMENT: (ErrorCode.INTERNAL, "it refused the request as malformed"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (ErrorCode.OVERLOADED, "it is overloaded"),
    grpc.StatusCode.NOT_FOUND: (ErrorCode.UNAVAILABLE, "it does not hold this version"),
    grpc.StatusCode.UNAVAILABLE: (ErrorCode.UNAVAILABLE, "it cannot be reached"),
    grpc.StatusCode.CANCELLED: (ErrorCode.UNAVAILABLE, "it called the request off"),
    grpc.StatusCode.UNIMPLEMENTED: (ErrorCode.UNAVAILABLE, "it cannot serve this version"),
}
"""Any other status is a shard that failed: ``unavailable``."""

_REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}

_DTYPES = {"embeddings": ("FP32", np.float32), "row_ids": ("INT64", np.int64), "hits": ("BOOL", np.bool_)}

MAX_OWED = 256
"""Calls to one shard that may be on their way without anybody waiting for them; a shard that owes more is not asked."""

MAX_OWED_BYTES = 256 << 20
"""What such calls to one shard may take, where nobody says otherwise."""

CLOSE_GRACE_S = 5.0
"""How long a connection that is being closed waits for calls under way, where nobody says otherwise."""

OFFLOAD_BYTES = 1 << 18
"""Messages over this size are built and read in a thread, and let go of as soon as they are sent."""

T = TypeVar("T")


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
    width: int
    """Numbers in a row of the reply."""
    num_rows: int
    """Rows of the reply: an id has as many as its table's numbers here take."""
    want_row_ids: bool = False
    want_hits: bool = False
    probe: bool = False
    """Not a client's: it is not counted."""

    @property
    def wire_bytes(self) -> int:
        """What a call takes on the wire: the request and the reply that it predicts, but for names and shapes."""
        per_id = self.ids_N.itemsize + 8 * self.want_row_ids + self.want_hits
        return self.table_lengths_T.nbytes + self.ids_N.size * per_id + self.num_rows * self.width * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReply:
    """Rows for the ids of a request, in its order; read-only views of the received message."""

    embeddings_RW: NDArray[np.float32]
    """[R, W]: ``num_rows`` and ``width`` of the request."""
    row_ids_N: NDArray[np.int64] | None = None
    hits_N: NDArray[np.bool_] | None = None


class ShardFailed(Exception):
    """A shard did not answer a call; the message is fit for a client: it names no address and quotes no upstream.

    Attributes:
        code: In the front tier's terms.
        details: What was really said, for the log.
        process_died: The shard's server lives, but its model process does not, and will not come back by itself.
        refused: The shard looked at what it was asked and will not answer it: asking again does not help.
    """

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode = ErrorCode.UNAVAILABLE,
        details: str = "",
        process_died: bool = False,
        refused: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.details = details or message
        self.process_died = process_died
        self.refused = refused


class ShardClient(Protocol):
    """One shard, wherever it runs."""

    async def lookup(self, request: ShardRequest, *, timeout_s: float) -> ShardReply:
        """Ask for rows; raises ``ShardFailed``. A caller may stop waiting at any time."""
        ...

    async def close(self, *, grace_s: float) -> None:
        """Let go of the connection, once calls under way have ended or ``grace_s`` is over."""
        ...


class GrpcShardClient:
    """A shard hosted by a Triton that is reached over gRPC.

    A call that is on its way is never cancelled on the wire, nor given a deadline there: Triton 2.51 aborts on calls that
    end early while a model process is dead or being replaced (``prior > 0`` in gRPC's reference counts), and takes every
    other model along. Callers stop waiting instead; the call runs out by itself, and so many may be owed at a time.

    Args:
        address: ``HOST:PORT`` of Triton's gRPC service.
        max_owed_bytes: Most ``ShardRequest.wire_bytes`` of calls that are on their way without anybody waiting for them.
            One call over it is made when nothing is owed: otherwise it could never be.
    """

    def __init__(self, address: str, *, max_owed_bytes: int = MAX_OWED_BYTES) -> None:
        self.address = address
        self._max_owed_bytes = max_owed_bytes
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        # Bytes in, bytes out: grpc.aio would build and parse messages on the event loop, half a second for 128 MB.
        self._infer = self._channel.unary_unary(_INFER)
        # The same bytes on the wire; but the other form holds on to the request until the reply is there.
        self._infer_large = self._channel.stream_unary(_INFER)
        self._calls: set[asyncio.Task[bytes]] = set()
        self._owed: dict[asyncio.Task[bytes], int] = {}

    @property
    def owed_bytes(self) -> int:
        """What calls take that are on their way without anybody waiting for them."""
        return sum(self._owed.values())

    async def lookup(self, request: ShardRequest, *, timeout_s: float) -> ShardReply:
        """See ``ShardClient.lookup``."""
        self._check_owed(request.wire_bytes)
        # The message has no name here: a failure's traceback would hold it.
        call = asyncio.create_task(self._call(await _offload(request.ids_N.nbytes, _encode, request)))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            async with asyncio.timeout(timeout_s):
                response = await asyncio.shield(call)
        except TimeoutError as exc:
            reason = f"it did not answer in {timeout_s:.3f} s"
            raise ShardFailed(reason, code=ErrorCode.DEADLINE_EXCEEDED, details=f"{self.address}: {reason}") from exc
        except grpc.aio.AioRpcError as exc:
            raise _translate(exc, self.address) from exc
        finally:
            if not call.done():
                self._owed[call] = request.wire_bytes
                call.add_done_callback(self._repaid)
        return await _offload(len(response), _decode, response, request)

    async def close(self, *, grace_s: float = CLOSE_GRACE_S) -> None:
        """See ``ShardClient.close``; what is still under way then is cancelled on the wire after all."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace_s)
        await self._channel.close()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _check_owed(self, nbytes: int) -> None:
        if len(self._owed) >= MAX_OWED:
            raise ShardFailed(f"it owes {len(self._owed)} answers that nobody waits for any more; try again later")
        if self._owed and (owed := self.owed_bytes) + nbytes > self._max_owed_bytes:
            raise ShardFailed(
                f"it owes {owed} bytes of answers that nobody waits for any more, and this call of {nbytes} bytes would "
                f"take it over the limit of {self._max_owed_bytes}; try again later"
            )

    async def _call(self, message: bytes) -> bytes:
        """The reply's bytes; none, if nobody waits for them any more."""
        if len(message) <= OFFLOAD_BYTES:
            response: bytes = await self._infer(message)
        else:
            call = self._infer_large()
            with contextlib.suppress(asyncio.InvalidStateError):  # it has ended already; the reply says how
                await call.write(message)
                del message
                await call.done_writing()
            response = await call
        return b"" if asyncio.current_task() in self._owed else response

    def _repaid(self, call: asyncio.Task[bytes]) -> None:
        del self._owed[call]
        if not call.cancelled():
            call.exception()  # nobody waits for it; asked for, so that asyncio does not complain of it


async def _offload(nbytes: int, work: Callable[..., T], *args: Any) -> T:
    return await asyncio.to_thread(work, *args) if nbytes > OFFLOAD_BYTES else work(*args)


def _encode(request: ShardRequest) -> bytes:
    version = np.array([request.version], dtype=np.int64)
    tensors = (("ids", request.ids_N), ("table_lengths", request.table_lengths_T), ("version", version))
    message = service_pb2.ModelInferRequest(
        model_name=request.model, model_version=str(request.base), id=PROBE_ID if request.probe else ""
    )
    for name, array in tensors:
        message.inputs.add(name=name, datatype="INT64", shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    message.outputs.add(name="embeddings")
    if request.want_row_ids:
        message.outputs.add(name="row_ids")
    if request.want_hits:
        message.outputs.add(name="hits")
    data: bytes = message.SerializeToString()
    return data


def _decode(data: bytes, request: ShardRequest) -> ShardReply:
    """Read the arrays off a response, and hold them against what was asked: a shard is another process."""
    n = request.ids_N.size
    try:
        message = service_pb2.ModelInferResponse.FromString(data)
        arrays = {
            output.name: _read(output, content, _DTYPES[output.name])
            for output, content in zip(message.outputs, message.raw_output_contents, strict=True)
        }
        reply = ShardReply(
            embeddings_RW=_expect(arrays["embeddings"], (request.num_rows, request.width)),
            row_ids_N=_expect(arrays["row_ids"], (n,)) if request.want_row_ids else None,
            hits_N=_expect(arrays["hits"], (n,)) if request.want_hits else None,
        )
    except (KeyError, ValueError, DecodeError) as exc:
        raise ShardFailed("its reply is malformed", code=ErrorCode.INTERNAL, details=repr(exc)) from exc
    return reply


def _read(output: Any, content: bytes, expected: tuple[str, Any]) -> NDArray[Any]:
    datatype, dtype = expected
    if output.datatype != datatype:
        raise ValueError(f"{output.name} is {output.datatype}, not {datatype}")
    return np.frombuffer(content, dtype=dtype).reshape(tuple(output.shape))


def _expect(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if array.shape != shape:
        raise ValueError(f"shape {array.shape}, {shape} was asked for")
    return array


def _translate(exc: grpc.aio.AioRpcError, address: str) -> ShardFailed:
    """The one place where gRPC's errors towards shards become ours."""
    status, said = exc.code(), exc.details() or ""
    code, reason = _CODES.get(status, (ErrorCode.UNAVAILABLE, "it failed"))
    died = _DEAD_STUB in said
    if died:
        code, reason = ErrorCode.UNAVAILABLE, "its process died"
    return ShardFailed(
        reason,
        code=code,
        details=f"{address} answered {status.name}: {said}",
        process_died=died,
        refused=status in _REFUSALS,
    )
