"""Reading a version: its manifest, and the programs that hash its ids."""

import pytest
import torch

from export import export_collection
from export.contract import RepositoryError, Routing, version_dir
from service.catalog import compile_version, load_version
from tests.manifests import make_manifest, make_table
from tests.modules import managed_collection, modulo_hash


def test_blocks_are_in_embedding_name_order_whatever_the_shards_order():
    tables = [
        make_table("b", ["x", "both"], routing=Routing.HASH, num_shards=2, shared=["both"]),
        make_table("a", ["both"], routing=Routing.HASH, num_shards=2, shared=["both"]),
    ]
    version = compile_version(make_manifest(tables, 2), {})
    assert [block.embedding_name for block in version.blocks["both"]] == ["both@b", "both@a"]
    order_S = [[held.table for held in tables] for tables in version.tables_S]
    assert order_S == [[1, 0], [1, 0]], "the shards list their tables the other way round"


@pytest.fixture(scope="module")
def hashed(tmp_path_factory):
    repo = tmp_path_factory.mktemp("catalog")
    export_collection(managed_collection(input_hash=modulo_hash), repo, name="hashed", num_shards=1)
    return repo


def test_an_exported_input_hash_is_the_modules_own(hashed):
    version = load_version(hashed, "hashed", 1)
    ids = torch.tensor([-(2**63), -1, 0, 1, 2**62, 2**63 - 1])
    tables = [table for table in version.tables if table.input_hash is not None]
    assert tables
    for table in tables:
        for some in (ids, ids[:1], ids[:0]):
            hashed_ids = table.input_hash(some)
            assert hashed_ids.dtype == torch.int64
            assert hashed_ids.shape == some.shape
            assert torch.equal(hashed_ids, table.input_hash(ids)[: some.numel()])


def test_an_input_hash_that_was_cut_is_refused_by_name(hashed, tmp_path):
    directory = version_dir(hashed, "hashed", 1)
    (program,) = directory.glob("input_hash_*.pt2")
    whole = program.read_bytes()
    program.write_bytes(whole[:-1])
    try:
        with pytest.raises(RepositoryError, match=program.name):
            load_version(hashed, "hashed", 1)
    finally:
        program.write_bytes(whole)
    load_version(hashed, "hashed", 1)


def test_an_input_hash_that_does_not_load_says_what_to_do(hashed):
    (program,) = version_dir(hashed, "hashed", 1).glob("input_hash_*.pt2")
    whole = program.read_bytes()
    program.write_bytes(bytes(len(whole)))
    try:
        with pytest.raises(RepositoryError, match=r"does not load with torch .* export again"):
            load_version(hashed, "hashed", 1)
    finally:
        program.write_bytes(whole)
