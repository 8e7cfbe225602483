"""An input hash travels as a program of its own, and only if an id's hash is a matter of that id alone."""

import functools
import io

import pytest
import torch

from export import export_collection
from export.contract import version_dir
from export.errors import ExportError
from export.input_hash import trace_input_hashes
from export.reading import read_collection
from tests.export.reader import expected, served
from tests.modules import managed_collection, map_of, modulo_hash, untrained_collection

OFFSET = torch.arange(1000)


def fold(ids, size):
    ids ^= ids >> 33
    ids *= -0x00AE502812AA7333
    ids ^= ids >> 29
    return ids.remainder_(size)


class TableHash(torch.nn.Module):
    """A module with state, and another behaviour in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("salt", torch.tensor([12345]))

    def forward(self, ids, size):
        return torch.remainder(ids + self.salt + (1 if self.training else 0), size)


def raw_ids():
    return torch.cat([torch.arange(-50, 1500), torch.tensor([2**62, -(2**63), 2**63 - 1])])


@pytest.mark.parametrize("function", [modulo_hash, fold, TableHash(), functools.partial(torch.remainder)])
def test_the_program_hashes_as_the_function_in_eval_mode(tmp_path, function):
    module = managed_collection(input_hash=function)
    manifest = export_collection(module, tmp_path, name="c", num_shards=2)
    program = torch.export.load(version_dir(tmp_path, "c", 1) / manifest.tables[0].input_hash).module()
    ids = raw_ids()
    module.eval()
    with torch.no_grad():
        hashed = function(ids.clone(), 1009)
    kept = ids.clone()
    assert torch.equal(program(ids), hashed)
    assert torch.equal(ids, kept)
    hits = served(tmp_path, manifest, {"user": hashed.tolist()})["user"]
    assert hits == expected(module, "user", hashed.tolist())
    assert sum(hit for _, _, hit in hits) > 10


def test_functions_and_sizes_that_differ_get_a_file_each():
    module = untrained_collection({"a": 4, "b": 4, "c": 4, "d": 4}, input_hash=modulo_hash)
    collisions = module._managed_collision_collection._managed_collision_modules
    collisions["b"]._input_hash_size = 77
    collisions["c"]._input_hash_func = None
    files = trace_input_hashes(read_collection(module))
    assert files.file_of == {"a": "input_hash_0.pt2", "b": "input_hash_1.pt2", "d": "input_hash_0.pt2"}
    program = torch.export.load(io.BytesIO(files.contents["input_hash_1.pt2"])).module()
    assert torch.equal(program(raw_ids()), modulo_hash(raw_ids(), 77))


def data_dependent(ids, size):
    return ids + 1 if int(ids.sum()) > 3 else ids


def position(ids, size):
    return ids + torch.arange(ids.shape[0])


def ranked(ids, size):
    return torch.argsort(ids)


def random(ids, size):
    return ids + torch.randint(0, 1000, ids.shape)


def halved(ids, size):
    return ids[::2]


def narrow(ids, size):
    return ids.int()


def tied_to_the_example(ids, size):
    return ids + OFFSET[: ids.shape[0]].sum() * 0 + torch.tensor([0, 0, 0, 0, 0]) if ids.shape[0] == 5 else ids * 2


def through_python(ids, size):
    return torch.tensor([hash((id_, "salt")) % size for id_ in ids.tolist()], dtype=torch.int64)


@pytest.mark.parametrize(
    "function", [data_dependent, position, ranked, random, halved, narrow, tied_to_the_example, through_python]
)
def test_a_function_that_cannot_travel_is_refused_naming_the_table(tmp_path, function):
    module = untrained_collection({"user": 4}, input_hash=function)
    with pytest.raises(
        ExportError, match=r"table user: its input_hash_func cannot be served: .*; use tensor operations"
    ) as raised:
        export_collection(module, tmp_path / "repo", name="c")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "repo").exists()


def test_an_operator_that_the_front_tier_lacks_is_refused():
    def through_fbgemm(ids, size):
        return torch.ops.fbgemm.asynchronous_complete_cumsum(ids)[1:] * 0 + ids

    module = untrained_collection({"user": 4}, input_hash=through_fbgemm)
    with pytest.raises(ExportError, match=r"table user: .*calls fbgemm.*, which the front tier does not have"):
        trace_input_hashes(read_collection(module))


def test_ids_that_hash_to_a_sentinel_are_unknown(tmp_path):
    module = untrained_collection({"user": 4}, input_hash=lambda ids, size: torch.where(ids == 5, 2**63 - 1, ids))
    manifest = export_collection(module, tmp_path, name="c", num_shards=2)
    assert map_of(module, "user") == {}
    assert [row[1:] for row in served(tmp_path, manifest, {"user": [2**63 - 1]})["user"]] == [(3, False)]
