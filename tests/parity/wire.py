"""The suite's client: one request through tritonclient, unchanged, over either protocol."""

import threading
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from numpy.typing import NDArray

from tests.parity.requests import Request

OUTPUTS = (
    "embeddings",
    "output_lengths",
    "row_ids",
    "hits",
    "unique_embeddings",
    "inverse",
    "missing",
    "weights",
    "indices",
)
_TYPES = {"int64": "INT64", "int32": "INT32", "float32": "FP32", "object": "BYTES"}


class Clients:
    """A client of each protocol for each thread: tritonclient's HTTP client belongs to the thread that made it."""

    def __init__(self, *, http: str, grpc: str) -> None:
        self._addresses = {"http": http, "grpc": grpc}
        self._local = threading.local()

    def infer(self, collection: str, request: Request) -> dict[str, NDArray]:
        """The outputs that came back."""
        api: ModuleType = triton_http if request.protocol == "http" else triton_grpc
        client = self._client(api, request.protocol)
        result = client.infer(
            collection,
            [_input(api, name, array) for name, array in _tensors(request).items() if array is not None],
            outputs=[api.InferRequestedOutput(name) for name in request.outputs] or None,
            parameters={"output_dtype": "FP16"} if request.half else None,
        )
        found = {name: result.as_numpy(name) for name in OUTPUTS}
        return {name: array for name, array in found.items() if array is not None}

    def _client(self, api: ModuleType, protocol: str) -> Any:
        mine = self._local.__dict__
        if protocol not in mine:
            mine[protocol] = api.InferenceServerClient(self._addresses[protocol])
        return mine[protocol]


def _tensors(request: Request) -> dict[str, NDArray | None]:
    keys = np.array([key.encode() for key in request.keys_F], dtype=np.object_)
    return {
        "values": request.values_N,
        "lengths": request.lengths,
        "keys": keys if request.send_keys else None,
        "stride_per_key": request.stride_per_key_F,
        "inverse_indices": request.inverse_indices_FB,
        "weights": request.weights_N,
    }


def _input(api: ModuleType, name: str, array: NDArray) -> Any:
    tensor = api.InferInput(name, list(array.shape), _TYPES[array.dtype.name])
    tensor.set_data_from_numpy(array)
    return tensor
