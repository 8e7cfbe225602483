"""A shard of a large table: what its processes hold once every id has been asked for."""

import gc
import os
import shutil

import numpy as np
import pytest
import torch

from benchmarks.process_memory import mapped_bytes, pss_bytes
from benchmarks.shapes import build_full_map, map_of, weight_of
from benchmarks.start import REQUEST_IDS, pss_limit_bytes, started_shard
from export import export_collection
from export.contract import shard_dir, version_dir
from export.contract.layout import STATE_FILE

pytestmark = pytest.mark.e2e

ROWS = 4_000_000
DIM = 128
COMPARE_EVERY = 16


@pytest.fixture
def repo(tmp_path):
    yield tmp_path / "repo"
    shutil.rmtree(tmp_path / "repo", ignore_errors=True)  # pytest would keep 2 GB of it, three times over


async def test_a_shard_of_a_2_gb_table_holds_its_state_once_and_little_more(repo):
    module = build_full_map(ROWS - 1, dim=DIM)
    (ids, rows), weight = map_of(module), weight_of(module)
    assert weight.nbytes > 2e9
    manifest = export_collection(module, repo, name="big", num_shards=1)
    (shard,) = manifest.shards
    gc.collect()
    state = shard_dir(version_dir(repo, "big", manifest.version), shard.index) / STATE_FILE
    assert mapped_bytes(os.getpid(), state) == 0, "we hold the state too, and so take our share off the shard's"

    async with started_shard(repo, manifest) as asked:
        for number, first in enumerate(range(0, len(ids), REQUEST_IDS)):
            part = slice(first, first + REQUEST_IDS)
            reply = await asked.lookup(ids[part].numpy())
            assert reply.hits_N.all()
            assert np.array_equal(reply.row_ids_N, rows[part].numpy())
            if number % COMPARE_EVERY == 0:
                expected = torch.index_select(weight, 0, rows[part]).numpy()
                assert reply.embeddings_RW.tobytes() == expected.tobytes()
        reply = await asked.lookup(ids[:100].numpy() + 1)
        assert not reply.hits_N.any()
        assert (reply.embeddings_RW == weight[-1].numpy()).all()

        held = {pid: pss_bytes(pid) for pid in asked.processes()}
        assert len(held) == 3, "the server, its guard and one model process"
        touched = sum(mapped_bytes(pid, state) for pid in held)
        assert touched >= 0.99 * shard.state_bytes, "not all of the state was in use when it was measured"
        assert sum(held.values()) <= pss_limit_bytes(shard.state_bytes), held
