"""Owns the methods of KServe's ``inference.GRPCInferenceService``: convert, await, convert."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import service_pb2 as pb

from service.description import model_config, model_metadata, model_statistics, repository_index, server_metadata
from service.errors import NotFound
from service.grpc.call import Answer, parse, unary
from service.grpc.tensors import read_infer, write_infer
from service.log import rename_request
from service.metrics import Metrics
from service.offload import Offload
from service.plane import Plane
from service.types import LookupRequest
from service.wire import read_version
from service.wire_tensors import shown


class Methods:
    """The methods over ``plane``. Those of Triton's that make no sense here are left out, and so are UNIMPLEMENTED.

    Args:
        plane: Who answers.
        offload: Where large tensors are converted.
    """

    def __init__(self, plane: Plane, offload: Offload) -> None:
        self._plane = plane
        self._offload = offload

    def handlers(self, metrics: Metrics) -> Mapping[str, grpc.RpcMethodHandler]:
        """Every method's handler by name."""
        methods: Mapping[str, tuple[str, Any, Answer]] = {
            "ServerLive": ("health", pb.ServerLiveRequest, self.server_live),
            "ServerReady": ("health", pb.ServerReadyRequest, self.server_ready),
            "ModelReady": ("health", pb.ModelReadyRequest, self.model_ready),
            "ServerMetadata": ("metadata", pb.ServerMetadataRequest, self.server_metadata),
            "ModelMetadata": ("metadata", pb.ModelMetadataRequest, self.model_metadata),
            "ModelConfig": ("config", pb.ModelConfigRequest, self.model_config),
            "ModelStatistics": ("statistics", pb.ModelStatisticsRequest, self.model_statistics),
            "RepositoryIndex": ("repository_index", pb.RepositoryIndexRequest, self.repository_index),
            "ModelInfer": ("grpc_infer", None, self.model_infer),
        }
        return {name: unary(route, kind, answer, metrics) for name, (route, kind, answer) in methods.items()}

    async def server_live(self, message: Any, context: grpc.aio.ServicerContext) -> bytes:  # noqa: ARG002
        """Whether this process answers: local, asks nobody."""
        return _serialize(pb.ServerLiveResponse(live=True))

    async def server_ready(self, message: Any, context: grpc.aio.ServicerContext) -> bytes:  # noqa: ARG002
        """Whether every shard of every collection answers."""
        return _serialize(pb.ServerReadyResponse(ready=self._plane.readiness().ready))

    async def model_ready(self, message: Any, context: grpc.aio.ServicerContext) -> bytes:  # noqa: ARG002
        """Whether every shard of a collection answers; one that is not served is not ready, as Triton says of it."""
        try:
            ready = self._plane.readiness(message.name, read_version(message.version)).ready
        except NotFound:
            ready = False
        return _serialize(pb.ModelReadyResponse(ready=ready))

    async def server_metadata(self, message: Any, context: grpc.aio.ServicerContext) -> bytes:  # noqa: ARG002
        """Name, version, extensions."""
        return _from_dict(server_metadata(), pb.ServerMetadataResponse())

    async def model_metadata(self, message: Any, context: grpc.aio.ServicerContext) -> bytes:  # noqa: ARG002
        """Inputs and outputs of a collection."""
        info = self._plane.collection(message.name, read_version(message.version))
        return _from_dict(model_metadata(info), pb.ModelMetadataResponse())

    async def model_config(self, message: Any, context: grpc.aio.ServicerContext) -> bytes:  # noqa: ARG002
        """A collection as a Triton ``ModelConfig``."""
        info = self._plane.collection(message.name, read_version(message.version))
        return _from_dict({"config": model_config(info)}, pb.ModelConfigResponse())

    async def model_statistics(self, message: Any, context: grpc.aio.ServicerContext) -> bytes:  # noqa: ARG002
        """Counts since start, of one collection or of all."""
        infos = self._plane.collections()
        if message.name:
            infos = (self._plane.collection(message.name, read_version(message.version)),)
        stats = [model_statistics(info, self._plane.statistics(info.name)) for info in infos]
        return _from_dict({"model_stats": stats}, pb.ModelStatisticsResponse())

    async def repository_index(self, message: Any, context: grpc.aio.ServicerContext) -> bytes:  # noqa: ARG002
        """Collections and versions with their states."""
        if message.repository_name:
            raise NotFound(
                f"repository_name: {shown(message.repository_name)}; there is one repository, without a name"
            )
        models = [(info, self._plane.readiness(info.name)) for info in self._plane.collections()]
        index = repository_index(models, only_ready=message.ready)
        return _from_dict({"models": index}, pb.RepositoryIndexResponse())

    async def model_infer(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Look a KeyedJaggedTensor up. Gets its message unparsed: nothing is done for a call that is not let in."""
        permit = self._plane.admit(len(data))
        # Done means sent, failed or cancelled: grpcio runs this when the call's task has ended.
        context.add_done_callback(lambda _: permit.release())
        permit.received_at = asyncio.get_running_loop().time()
        permit.work()
        message = await self._offload.run(len(data), parse, pb.ModelInferRequest, data)
        self._plane.collection(message.model_name, read_version(message.model_version))
        rename_request(message.id)
        call = await self._offload.run(len(data), read_infer, message)
        reply = await self._plane.lookup(_cap_deadline(call.request, context.time_remaining()), permit)
        size = sum(array.nbytes for array in reply.outputs.values())
        return await self._offload.run(size, write_infer, call, reply)


def _cap_deadline(request: LookupRequest, remaining_s: float | None) -> LookupRequest:
    """The smaller of the deadline that the request names and the one that its call has."""
    if remaining_s is None or (request.timeout_s is not None and request.timeout_s <= remaining_s):
        return request
    return replace(request, timeout_s=max(remaining_s, 1e-3))


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _from_dict(content: dict[str, Any], message: Any) -> bytes:
    return _serialize(ParseDict(content, message))
