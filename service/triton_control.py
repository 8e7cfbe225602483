"""Owns the calls that steer a Triton's models: which are there, load, unload; must not know processes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from service.triton_log import first_line

CALL_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 300.0


class TritonCallError(Exception):
    """Triton did not do what it was asked; the message is the first line of Triton's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """One line of Triton's repository index."""

    model: str
    version: str
    """Empty for a model that was never loaded."""
    ready: bool
    """What Triton believes: it says so of a model process that was killed, too."""
    reason: str


async def read_server_id(address: str) -> str:
    """The name that the server was started with (``--id``); raises ``TritonCallError`` while nobody answers there."""
    async with _service(address) as service:
        metadata = await service.ServerMetadata(service_pb2.ServerMetadataRequest(), timeout=CALL_TIMEOUT_S)
    return str(metadata.name)


async def read_index(address: str) -> list[ModelState]:
    """Triton's repository index; raises ``TritonCallError``."""
    async with _service(address) as service:
        index = await service.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=CALL_TIMEOUT_S)
    return [
        ModelState(model=line.name, version=line.version, ready=line.state == "READY", reason=line.reason)
        for line in index.models
    ]


async def load_model(address: str, model: str, config: str) -> None:
    """Load what ``config`` asks for and is not loaded, or changed on disk; unload what it does not ask for.

    A version that it asks for and that is not on disk is left out in silence.

    Args:
        address: Of the server's gRPC service.
        model: Its name.
        config: The model's whole configuration, as JSON; used in place of the one in the repository.

    Raises:
        TritonCallError: A version failed to load; the others are as they were.
    """
    async with _service(address) as service:
        request = service_pb2.RepositoryModelLoadRequest(model_name=model)
        request.parameters["config"].string_param = config
        await service.RepositoryModelLoad(request, timeout=LOAD_TIMEOUT_S)


async def unload_model(address: str, model: str) -> None:
    """Unload every version of a model; returns before they are gone. Raises ``TritonCallError``."""
    async with _service(address) as service:
        request = service_pb2.RepositoryModelUnloadRequest(model_name=model)
        await service.RepositoryModelUnload(request, timeout=CALL_TIMEOUT_S)


@asynccontextmanager
async def _service(address: str) -> AsyncIterator[Any]:
    """Triton's gRPC service on a connection of its own: a server that restarts leaves no channel in back-off."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            yield service_pb2_grpc.GRPCInferenceServiceStub(channel)
        except grpc.aio.AioRpcError as exc:
            raise TritonCallError(f"{address} answered {exc.code().name}: {first_line(exc.details() or '')}") from exc
