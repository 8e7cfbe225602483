"""The oracle answers what the trainers' own collections answered."""

import pytest
import torch
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection

from tests.parity.ranks import WORLDS, answerable, known_ids, request_of
from tests.parity.tables import plain_tables, write_rows
from tests.parity.trained import plain, train_alone, train_on_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def sharded(folder):
    return train_on_ranks(folder)


@pytest.mark.parametrize("world", WORLDS)
def test_known_and_unknown_ids_get_the_rows_that_the_sharded_collection_gave_them(world, sharded, folder):
    answers = torch.load(folder / f"w{world}" / "answers.pt", weights_only=True)
    hits = misses = 0
    for table in sharded[world].tables:
        oracle = sharded[world].oracle(table, zero=False)
        for feature in table.features:
            found = oracle.look_up(torch.tensor(answers["ids"][feature]))
            assert found.row_ids_N.tolist() == answers["rows"][feature], table
            hits, misses = hits + int(found.hits_N.sum()), misses + int((~found.hits_N).sum())
    assert hits > 300
    assert misses > 300


@pytest.mark.parametrize("world", WORLDS)
def test_the_ranks_maps_are_full_and_have_evicted(world, sharded):
    for table in sharded[world].tables:
        pool = sharded[world].pool(table)
        assert len(set(pool)) > table.rows // 2


def test_the_plain_collections_own_forward_gives_the_oracles_rows():
    trained = plain(plain_tables(1), 6)
    features = list(dict.fromkeys(feature for table in trained.tables for feature in table.features))
    ids = {feature: [9, 0, 3, 3, at % 10] for at, feature in enumerate(features)}
    answer = trained.module(request_of(ids))
    named = zip(trained.tables, trained.module.embedding_names_by_table(), strict=True)
    for table, names in named:
        for feature, name in zip(table.features, names, strict=True):
            found = trained.oracle(table, zero=False).look_up(torch.tensor(ids[feature]))
            assert torch.equal(found.embeddings_ND, answer[name].values())


def test_the_managed_collections_own_forward_gives_the_oracles_rows():
    """Where it is well defined: modules in the order of the configs, no sentinels, nothing that MPZCH drops."""
    trained = train_alone()
    tables = [table for table in trained.tables if table.fallback in {None, "slot", "reserved"}]
    modules = {table.name: trained.pieces[table.name][0] for table in tables}
    for module in modules.values():
        module.reset_inference_mode()
    configs = [table.config(trained.dim) for table in tables]
    collection = ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=configs), ManagedCollisionCollection(modules, configs), return_remapped_features=True
    ).eval()
    write_rows(collection._embedding_module, tables, trained.dim)
    ids = {feature: answerable(table, known_ids(modules[table.name])) for table in tables for feature in table.features}
    embeddings, remapped = collection(request_of(ids))
    for table in tables:
        for feature in table.features:
            found = trained.oracle(table, zero=False).look_up(torch.tensor(ids[feature]))
            assert torch.equal(found.row_ids_N, remapped[feature].values()[: len(ids[feature])]), table
            assert torch.equal(found.embeddings_ND, embeddings[feature].values()[: len(ids[feature])]), table
