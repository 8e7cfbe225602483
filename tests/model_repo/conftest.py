"""Fixtures: a stand-in for Triton's pb_utils, and a version directory small enough to check by hand."""

import hashlib
import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import fbgemm_gpu
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import model_repo
from export.contract import Manifest, shard_model_name
from export.contract.layout import (
    CONFIG_FILE,
    MANIFEST_FILE,
    PROGRAM_FILE,
    RUNTIME_FILE,
    STATE_FILE,
)

DIM = 4
COLLECTION = "clicks"
MODEL = shard_model_name(COLLECTION, 0)


class TinyShard(torch.nn.Module):
    """Two tables by the exporter's signature: `user` (mch) knows ids 100..104, `item` (plain) has rows 0..2."""

    def forward(self, ids_N, table_lengths_T, state: list[torch.Tensor]):
        known_K, row_ids_R, rows_RD = state
        table_N = torch.repeat_interleave(torch.arange(2), table_lengths_T, output_size=ids_N.shape[0])
        user_N = torch.searchsorted(known_K, ids_N).clamp(max=known_K.shape[0] - 1)
        user_hit_N = known_K[user_N] == ids_N
        item_hit_N = (ids_N >= 0) & (ids_N < 3)
        hits_N = torch.where(table_N == 0, user_hit_N, item_hit_N)
        user_row_N = torch.where(user_hit_N, user_N, 5)
        item_row_N = torch.where(item_hit_N, ids_N + 6, 9)
        local_N = torch.where(table_N == 0, user_row_N, item_row_N)
        row_ids_N = torch.index_select(row_ids_R, 0, local_N)
        return torch.index_select(rows_RD, 0, local_N), row_ids_N, hits_N, torch.zeros_like(hits_N)


KNOWN_K = torch.arange(100, 105)
ROW_IDS_R = torch.tensor([10, 11, 12, 13, 14, 19, 0, 1, 2, -1])
ROWS_RD = torch.arange(10 * DIM, dtype=torch.float32).reshape(10, DIM)


def write_version(repo: Path, version: int = 1) -> Path:
    """Write REPO/clicks/<version> and Triton's link to its shard 0; return the link."""
    directory = repo / COLLECTION / str(version)
    shard = directory / "shard_0"
    shard.mkdir(parents=True)
    auto = torch.export.Dim.AUTO
    example = (torch.arange(7), torch.tensor([3, 4]), [KNOWN_K, ROW_IDS_R, ROWS_RD])
    program = torch.export.export(TinyShard(), example, dynamic_shapes=({0: auto}, None, [{0: auto}] * 3), strict=False)
    torch.export.save(program, shard / PROGRAM_FILE)
    state = {"known": KNOWN_K, "row_ids": ROW_IDS_R, "rows": ROWS_RD}
    save_file(state, shard / STATE_FILE)
    (shard / RUNTIME_FILE).write_bytes((Path(model_repo.__file__).parent / RUNTIME_FILE).read_bytes())
    (shard / "__pycache__").touch()  # bytecode would make Triton take the version for a changed one
    manifest = {
        "collection": COLLECTION,
        "version": version,
        "base": version,
        "created_s": 1.0,
        "num_shards": 1,
        "dim": DIM,
        "tables": [
            _table("user", "mch", zch={"policy": "LFU_EvictionPolicy", "size": 20, "occupied": 5, "open_slots": 14}),
            _table("item", "none", zch=None),
        ],
        "shards": [
            {
                "index": 0,
                "model": MODEL,
                "width": DIM,
                "tables": [
                    {"table": "user", "rows": 6, "width": DIM, "zch_rows": 5, "zch_open_slots": 14},
                    {"table": "item", "rows": 3, "width": DIM},
                ],
                "state": list(state),
                "state_bytes": sum(tensor.nbytes for tensor in state.values()),
            }
        ],
        "files": [_file(directory, path) for path in sorted(shard.iterdir()) if path.name != "__pycache__"],
        "toolchain": {
            "kjtserve": "0.1.0",
            "torch": torch.__version__,
            "fbgemm_gpu": fbgemm_gpu.__version__,
            "torchrec": "1.8.0",
        },
    }
    text = Manifest.model_validate_json(json.dumps(manifest)).model_dump_json()
    (directory / MANIFEST_FILE).write_text(text)
    return link_version(repo, version)


def link_version(repo: Path, version: int) -> Path:
    model = repo / MODEL
    model.mkdir(exist_ok=True)
    config = (Path(model_repo.__file__).parent / CONFIG_FILE).read_text()
    (model / CONFIG_FILE).write_text(config.replace('name: ""', f'name: "{MODEL}"'))
    link = model / str(version)
    link.symlink_to(Path("..") / COLLECTION / str(version) / "shard_0")
    return link


@pytest.fixture
def edit_manifest(link) -> Callable[[Callable[[dict], None]], None]:
    """Change the manifest beside ``link`` in place."""

    def edit(change):
        path = link.resolve().parent / MANIFEST_FILE
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return edit


def _table(name, remap, zch):
    return {
        "name": name,
        "rows": 20 if zch else 3,
        "dim": DIM,
        "row_dtype": "fp32",
        "features": [name],
        "embedding_names": [name],
        "remap": remap,
        "routing": "table",
        "placements": [{"shard": 0, "row_start": 0, "row_stop": 20 if zch else 3}],
        "zch": zch,
        "training": {"input_hash_size": 0, "row_edges": [0, 20]} if zch else None,
    }


def _file(directory, path):
    content = path.read_bytes()
    name = str(path.relative_to(directory))
    return {"path": name, "size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.fixture(scope="session")
def pristine_repo(tmp_path_factory) -> Path:
    repo = tmp_path_factory.mktemp("repo")
    write_version(repo)
    return repo


@pytest.fixture
def link(pristine_repo, tmp_path) -> Path:
    """Triton's version directory of shard 0, in a copy that the test may damage."""
    source = pristine_repo / COLLECTION / "1"
    target = tmp_path / COLLECTION / "1"
    (target / "shard_0").mkdir(parents=True)
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).write_bytes(path.read_bytes())
    return link_version(tmp_path, 1)


@pytest.fixture
def add_version(link) -> Callable[[int], Path]:
    """Publish another version beside version 1; returns Triton's directory of it."""
    return lambda version: write_version(link.parent.parent, version)


class FakeTensor:
    """pb_utils.Tensor over a numpy array."""

    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array

    def to_dlpack(self):
        return torch.utils.dlpack.to_dlpack(torch.from_numpy(self._array))


class FakeError(Exception):
    """pb_utils.TritonError."""

    INTERNAL, NOT_FOUND, INVALID_ARG, CANCELLED = "INTERNAL", "NOT_FOUND", "INVALID_ARG", "CANCELLED"
    UNAVAILABLE, UNSUPPORTED = "UNAVAILABLE", "UNSUPPORTED"

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


@dataclass
class FakeResponse:
    """pb_utils.InferenceResponse."""

    output_tensors: list[FakeTensor] = field(default_factory=list)
    error: FakeError | None = None

    def outputs(self) -> dict[str, np.ndarray]:
        assert self.error is None, self.error
        return {tensor.name(): tensor.as_numpy() for tensor in self.output_tensors}


@dataclass(kw_only=True)
class FakeRequest:
    """pb_utils.InferenceRequest."""

    inputs: dict[str, np.ndarray]
    outputs: tuple[str, ...] = ("embeddings", "row_ids", "hits")
    cancelled: bool = False
    id: str = ""

    def request_id(self):
        return self.id

    def requested_output_names(self):
        return set(self.outputs)

    def is_cancelled(self):
        return self.cancelled


@pytest.fixture
def make_request() -> Callable[..., FakeRequest]:
    """Build a request for version 1 of the tiny shard; an input of None is left out."""

    def make(ids=(), table_lengths=(0, 0), version=(1,), **rest):
        arrays = {"ids": ids, "table_lengths": table_lengths, "version": version}
        inputs = {
            name: array if isinstance(array, np.ndarray) else np.array(array, dtype=np.int64)
            for name, array in arrays.items()
            if array is not None
        }
        return FakeRequest(inputs=inputs, **rest)

    return make


class FakeMetrics:
    """One metrics page, as Triton has one for all models of a process."""

    def __init__(self):
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.broken = False
        self.threads: set[str] = set()

    def family(self):
        page = self

        class MetricFamily:
            COUNTER, GAUGE = "counter", "gauge"

            def __init__(self, *, name, description, kind):
                self.name, self.description, self.kind = name, description, kind

            def Metric(self, *, labels):  # noqa: N802 - pb_utils' own name
                return FakeMetric(page, self, (self.name, tuple(sorted(labels.items()))))

        return MetricFamily

    def __getitem__(self, key):
        name, labels = key
        return self.values[name, tuple(sorted(labels.items()))]


class FakeMetric:
    """pb_utils.Metric."""

    def __init__(self, page, family, key):
        self._page, self._family, self._key = page, family, key
        page.values.setdefault(key, 0)

    def increment(self, value):
        if self._page.broken:
            raise RuntimeError("Triton is going away")
        assert self._family.kind == "counter"
        self._page.threads.add(threading.current_thread().name)
        self._page.values[self._key] += value

    def set(self, value):
        assert self._family.kind == "gauge"
        self._page.values[self._key] = value


class FakeLogger:
    """pb_utils.Logger."""

    def __init__(self):
        self.lines: list[str] = []

    def log_warn(self, line):
        self.lines.append(line)

    log_error = log_warn


@pytest.fixture
def pb_utils(monkeypatch) -> Iterator[types.ModuleType]:
    """A stand-in for the module that Triton's stub provides."""
    module = types.ModuleType("triton_python_backend_utils")
    module.Tensor = FakeTensor
    module.TritonError = FakeError
    module.TritonModelException = type("TritonModelException", (Exception,), {})
    module.InferenceResponse = FakeResponse
    module.page = FakeMetrics()
    module.MetricFamily = module.page.family()
    module.Logger = FakeLogger()
    module.get_input_tensor_by_name = lambda request, name: (
        FakeTensor(name, request.inputs[name]) if name in request.inputs else None
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "model_repo.runtime", raising=False)
    threads = torch.get_num_threads()
    monkeypatch.setenv("KJTSERVE_SHARD_THREADS", "1")
    yield module
    torch.set_num_threads(threads)
    sys.modules.pop("model_repo.runtime", None)
