"""``.metadata`` of a checkpoint, damaged or hostile: whatever is in it, an ExportError of one line comes out."""

import pickle
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from export.checkpoint_metadata import FileSpan, read_metadata
from export.errors import ExportError
from export.restoring import restore_collection
from tests.modules import managed_collection, plain_collection, untrained_collection

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")

USER = "embeddings.user.weight"
FLIPS = 700


@pytest.fixture
def checkpoint(tmp_path):
    dcp.save(plain_collection().state_dict(), checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def refusal(checkpoint, module=None):
    """The line in which a checkpoint is refused; empty where it is read."""
    line = ""
    try:
        source = restore_collection(module or plain_collection(), checkpoint)
        for table in source.tables:
            table.numbers.read(0, table.rows)
    except ExportError as exc:
        line = str(exc)
    assert "\n" not in line
    return line


def test_tensors_are_described_as_dcp_wrote_them(checkpoint):
    tensors = read_metadata(checkpoint / ".metadata")
    module = plain_collection()
    assert {name: tensor.size for name, tensor in tensors.items()} == {
        name: tuple(weight.shape) for name, weight in module.state_dict().items()
    }
    (chunk,) = tensors[USER].chunks
    assert (chunk.offsets, chunk.sizes) == ((0, 0), (10, 4))
    assert chunk.span == FileSpan(file="__0_0.distcp", offset=0, length=chunk.span.length, transforms=())


def forget(record, field):
    del record.__dict__[field]


def give(record, field, value):
    record.__dict__[field] = value


def span_of(metadata):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == USER)


def chunk_at(metadata, offsets, sizes):
    """The chunk of the user table, moved; the same file holds it."""
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    metadata.state_dict_metadata[USER].chunks = [chunk]
    metadata.storage_data[MetadataIndex(USER, offsets)] = span_of(metadata)


DAMAGES = {
    "no relative_path": (lambda it: forget(span_of(it), "relative_path"), f"{USER}': relative_path holds NoneType"),
    "no offset": (
        lambda it: forget(span_of(it), "offset"),
        "offset holds NoneType, not int; copy the checkpoint again",
    ),
    "no length": (lambda it: forget(span_of(it), "length"), "length holds NoneType, not int"),
    "an offset that is text": (lambda it: give(span_of(it), "offset", "0"), "offset holds str, not int"),
    "an offset before the file": (lambda it: give(span_of(it), "offset", -5), "not all integers from 0 to 2^63 - 1"),
    "a length beyond all files": (lambda it: give(span_of(it), "length", 10**5000), "not all integers from 0"),
    "NUL in a path": (lambda it: give(span_of(it), "relative_path", "a\0b"), r"relative_path 'a\x00b' is no name of"),
    "a lone surrogate in a path": (lambda it: give(span_of(it), "relative_path", "\ud800"), "is no name of a file"),
    "compressed": (lambda it: give(span_of(it), "transform_descriptors", ["zstd"]), "stored through ['zstd']; save it"),
    "transforms that are none": (lambda it: give(span_of(it), "transform_descriptors", 3), "are not all names"),
    "no storage_data": (
        lambda it: give(it, "storage_data", None),
        "holds no metadata of a checkpoint on a file system",
    ),
    "storage_data of integers": (
        lambda it: give(it, "storage_data", {1: 2}),
        "storage_data holds int, not MetadataIndex",
    ),
    "a span that is none": (lambda it: it.storage_data.update({MetadataIndex("a"): 2}), "holds int, not _StorageInfo"),
    "no state_dict_metadata": (lambda it: give(it, "state_dict_metadata", None), "holds NoneType, not dict"),
    "a name that is a number": (
        lambda it: it.state_dict_metadata.update({1: it.state_dict_metadata[USER]}),
        "state_dict_metadata: a name holds int, not str",
    ),
    "an entry that is none": (lambda it: it.state_dict_metadata.update({"a": 1}), "'a' holds int, not BytesStorage"),
    "no size": (lambda it: forget(it.state_dict_metadata[USER], "size"), "size holds NoneType, not tuple"),
    "a size of words": (lambda it: give(it.state_dict_metadata[USER], "size", ("a",)), "size are not all integers"),
    "no chunks": (lambda it: forget(it.state_dict_metadata[USER], "chunks"), "chunks holds NoneType, not list"),
    "chunks of integers": (
        lambda it: it.state_dict_metadata[USER].chunks.append(1),
        "chunks holds int, not ChunkStorageMetadata",
    ),
    "a chunk of one dimension": (
        lambda it: chunk_at(it, (0,), (40,)),
        "a chunk of (40,) at (0,), which is not in (10, 4)",
    ),
    "a chunk past the end": (lambda it: chunk_at(it, (8, 0), (10, 4)), "at (8, 0), which is not in (10, 4); copy"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_metadata_that_is_not_as_dcp_writes_it_is_refused_naming_the_field(checkpoint, damage):
    file = checkpoint / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change, line = DAMAGES[damage]
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))
    assert line in refusal(checkpoint)


def test_an_unprintable_name_is_quoted(tmp_path):
    dcp.save({"a\nb": torch.zeros(1)}, checkpoint_id=tmp_path, no_dist=True)
    assert refusal(tmp_path).endswith(r"holds no embeddings.user.weight; it has 'a\nb'")


def test_a_pickle_that_changes_a_class_changes_no_class_of_ours(checkpoint):
    """BUILD on a class, with attributes for it: pickle sets them on whatever the pickle names."""
    hostile = b"cpathlib\nPosixPath\n(N(dS'resolve'\nI1\nstb."
    (checkpoint / ".metadata").write_bytes(hostile)
    before = vars(type(checkpoint)).get("resolve")
    assert "cannot be read (TypeError" in refusal(checkpoint)
    assert vars(type(checkpoint)).get("resolve") is before


def test_an_index_far_outside_of_the_pickle_takes_no_memory(checkpoint):
    (checkpoint / ".metadata").write_bytes(b"\x80\x04Nr\xff\xff\xff\xff.")
    assert "holds no metadata of a checkpoint" in refusal(checkpoint)


@pytest.mark.parametrize("kind", ["plain", "managed"])
def test_flipped_bytes_are_read_or_refused_in_one_line(tmp_path, kind):
    module = plain_collection() if kind == "plain" else managed_collection()
    dcp.save(module.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    empty = plain_collection() if kind == "plain" else untrained_collection(device="meta")
    file = tmp_path / ".metadata"
    whole, chance = file.read_bytes(), random.Random(8)
    lines = []
    for _ in range(FLIPS):
        content = bytearray(whole)
        for _ in range(chance.choice([1, 1, 1, 2, 8])):
            content[chance.randrange(len(content))] = chance.randrange(256)
        file.write_bytes(content)
        lines.append(refusal(tmp_path, empty))
    assert 0 < lines.count("") < FLIPS / 2
    assert len({line.split(": ", 1)[-1] for line in lines}) > 50
