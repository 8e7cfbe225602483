"""Who answers for a table that several shards hold: whoever has least to do, and no more of them than it is worth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.spreading import WORTH_A_CALL, level_loads, spread_ids

NOBODY = frozenset()
loads = st.dictionaries(st.integers(0, 7), st.integers(0, 50), min_size=1)


def sizes(parts):
    return {shard: part.stop - part.start for shard, part in parts.items()}


def ids(count, first=0):
    return np.arange(first, first + count, dtype=np.int64)


@given(loads, st.integers(0, 200))
def test_water_fills_the_lightest_to_one_level_and_leaves_the_others_alone(load, num_ids):
    shares = level_loads(load, num_ids)
    assert sum(shares.values()) == num_ids
    assert min(shares.values()) >= 0
    after = {shard: load[shard] + shares.get(shard, 0) for shard in load}
    served = [after[shard] for shard, share in shares.items() if share]
    if served:
        assert max(served) - min(after.values()) <= 1, "somebody got an id while another had two fewer"


@given(
    st.lists(st.one_of(st.integers(0, 3), st.integers(0, 5000)), min_size=8, max_size=8),
    st.lists(st.integers(0, 7), min_size=1, unique=True),
    st.one_of(st.integers(0, 20_000), st.sampled_from([WORTH_A_CALL, 2 * WORTH_A_CALL])),
    st.frozensets(st.integers(0, 7)),
)
def test_the_runs_cover_all_ids_once_on_shards_that_hold_the_table(load, holders, count, avoid):
    parts = spread_ids(ids(count), holders, load, avoid)
    covered = np.concatenate([ids(count)[part] for part in parts.values()] or [ids(0)])
    assert np.array_equal(np.sort(covered), ids(count))
    assert set(parts) <= (set(holders) - avoid or set(holders))
    newly = [size for shard, size in sizes(parts).items() if not load[shard]]
    assert not newly or min(newly) >= min(WORTH_A_CALL, count)


def test_what_the_shards_do_anyway_is_evened_out():
    load_S = [9_000, 1_000, 5_000]
    assert sizes(spread_ids(ids(6_000), [0, 1, 2], load_S, NOBODY)) == {1: 5_000, 2: 1_000}


@pytest.mark.parametrize("count", [1, WORTH_A_CALL - 1])
def test_a_few_ids_stay_with_the_shards_that_are_asked_anyway(count):
    load_S = [0, 5, 0, 0]
    assert sizes(spread_ids(ids(count), [0, 1, 2, 3], load_S, NOBODY)) == {1: count}


def test_many_ids_are_spread_over_all_holders():
    parts = spread_ids(ids(4 * WORTH_A_CALL), [3, 0, 2, 1], [0] * 4, NOBODY)
    assert sizes(parts) == dict.fromkeys(range(4), WORTH_A_CALL)


def test_small_batches_take_turns_and_the_same_batch_always_takes_the_same_shard():
    idle_S = [0] * 4
    taken = [[*spread_ids(ids(3, first), [0, 1, 2, 3], idle_S, NOBODY)] for first in range(400)]
    assert taken == [[*spread_ids(ids(3, first), [0, 1, 2, 3], idle_S, NOBODY)] for first in range(400)]
    assert all(len(shards) == 1 for shards in taken)
    assert np.bincount([shard for (shard,) in taken], minlength=4).min() > 60


def test_a_shard_to_avoid_is_asked_only_when_no_other_holds_the_table():
    load_S = [10, 0]
    assert set(spread_ids(ids(2), [0, 1], load_S, frozenset({0}))) == {1}
    assert set(spread_ids(ids(2), [0], load_S, frozenset({0}))) == {0}
