"""Owns the seam between Triton's Python backend and a loaded shard: tensors in, one call, tensors out.

The only module that imports ``triton_python_backend_utils``. Must not compute anything.
"""

import os
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from export.contract import PROBE_ID
from model_repo.deltas import Deltas
from model_repo.errors import BadRequest, Cancelled, NotReady, RequestError, ShardLoadError, Unservable, WrongVersion
from model_repo.metrics import ShardMetrics
from model_repo.process import keep_freed_memory, shard_threads
from model_repo.shard import LoadedShard, load_shard

CANCEL_CHECK_IDS = 1024
"""Asking Triton whether a request is cancelled costs 80 µs, more than looking up fewer ids than this."""


class TritonPythonModel:
    """What Triton's stub process drives: one instance serves one base of one shard, and deltas on it."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the version that ``args`` names, and warm it up.

        Raises:
            TritonModelException: It cannot be served; the message says why and what to do.
        """
        try:
            torch.set_num_threads(shard_threads(os.environ))
            keep_freed_memory()
            directory = Path(args["model_repository"]) / args["model_version"]
            shard = load_shard(directory, args["model_name"])
            shard.warm_up()
        except (ShardLoadError, ValueError) as exc:
            raise pb_utils.TritonModelException(str(exc)) from exc
        self._shard: LoadedShard = shard
        self._deltas = Deltas(shard, directory)
        self._metrics = ShardMetrics(pb_utils, shard)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer each request by itself: one that fails leaves its neighbours alone."""
        return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        """Hand over the last counts before the process ends."""
        self._metrics.close()
        self._deltas.close()

    def _answer(self, request: Any) -> Any:
        try:
            return self._lookup(request)
        except RequestError as exc:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(exc), _triton_code(exc)))
        except Exception:  # noqa: BLE001 - an edge: whatever happens, Triton gets an answer for this request
            pb_utils.Logger.log_error(f"{self._shard.shard.model}: {traceback.format_exc()}")
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError("the shard failed; its log says why", pb_utils.TritonError.INTERNAL)
            )

    def _lookup(self, request: Any) -> Any:
        version = self._deltas.find(_number(_input(request, "version")))
        ids_N = _input(request, "ids")
        table_lengths_T = _input(request, "table_lengths")
        if ids_N.numel() >= CANCEL_CHECK_IDS and request.is_cancelled():
            raise Cancelled("the caller cancelled the request")
        answer = self._shard.lookup(version, ids_N, table_lengths_T)
        if request.request_id() != PROBE_ID:
            self._metrics.count(version, answer, table_lengths_T.tolist())
        wanted = request.requested_output_names()
        outputs = {"embeddings": answer.embeddings_ND, "row_ids": answer.row_ids_N, "hits": answer.hits_N}
        return pb_utils.InferenceResponse(
            output_tensors=[_output(name, tensor) for name, tensor in outputs.items() if name in wanted]
        )


def _number(version: torch.Tensor) -> int:
    if version.numel() != 1:
        raise BadRequest(f"version: {version.numel()} numbers; it must be one")
    return int(version)


def _input(request: Any, name: str) -> torch.Tensor:
    """A view of the request's tensor, valid until ``execute`` returns."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        raise BadRequest(f"{name}: the input is missing")
    return torch.utils.dlpack.from_dlpack(tensor.to_dlpack())


def _output(name: str, tensor: torch.Tensor) -> Any:
    # From a numpy array and not by DLPack: Triton copies a DLPack tensor once more on its way out (16 MB: 2.6 ms and
    # the page faults of a fresh mapping, against 0.2 ms). load_shard has refused numpy 2, which would arrive empty.
    return pb_utils.Tensor(name, tensor.contiguous().numpy())


def _triton_code(error: RequestError) -> Any:
    codes = {
        BadRequest: pb_utils.TritonError.INVALID_ARG,
        WrongVersion: pb_utils.TritonError.NOT_FOUND,
        NotReady: pb_utils.TritonError.UNAVAILABLE,
        Unservable: pb_utils.TritonError.UNSUPPORTED,
        Cancelled: pb_utils.TritonError.CANCELLED,
    }
    return codes[type(error)]
