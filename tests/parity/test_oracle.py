"""The oracle answers what the trainers' own collections answered."""

import pytest
import torch

from tests.parity.ranks import WORLDS, request_of
from tests.parity.trained import train_alone, train_on_ranks


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


def test_the_unsharded_collections_forward_gives_the_oracles_rows():
    """The module dict's order differs from the configs', so the collection is asked table by table."""
    trained = train_alone()
    module = trained.module.eval()
    for table in trained.tables:
        if table.fallback:
            continue
        ids = [id_ for id_ in trained.pool(table) if id_ not in (-1, 2**63 - 1)]
        collision = module._managed_collision_collection._managed_collision_modules[table.name]
        rows = collision(request_of({"ids": ids}).to_dict())["ids"].values()
        expected = module._embedding_module.embeddings[table.name](rows).float()
        found = trained.oracle(table, zero=False).look_up(torch.tensor(ids))
        assert torch.equal(found.row_ids_N, rows)
        assert torch.equal(found.embeddings_ND, expected)
