"""The arithmetic of remaps in INT64 against the contract's, one id at a time."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from export.bucket_state import bucket_rule
from export.contract import INT64_MAX, TrainingBuckets, as_unsigned, training_bucket
from export.remaps import BUCKET_STATE, AllUnits, WideRemap, find_bucket

IDS = st.integers(-INT64_MAX - 1, INT64_MAX)
EDGES = [0, 1, -1, INT64_MAX, -INT64_MAX - 1, -INT64_MAX, 2**62, 2**62 - 1, 999, 1000, 1001]


def buckets_of(count, size, *, floor=False):
    return TrainingBuckets(input_hash_size=size, row_edges=tuple(range(count + 1)), floor_modulo=floor)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0, 1, 7, 1000, INT64_MAX, INT64_MAX - 1])), max_size=4),
    st.lists(IDS, max_size=20),
)
@example([(3, INT64_MAX), (7, INT64_MAX), (1, 0)], [])
def test_a_bucket_is_the_contracts(tables, ids):
    rules = [buckets_of(count, size) for count, size in tables]
    asked = torch.tensor([*ids, *EDGES] * len(rules), dtype=torch.int64)
    lengths = torch.full((len(rules),), len(ids) + len(EDGES))
    state = bucket_rule(rules)
    found = find_bucket(asked, lengths, [state[name] for name in BUCKET_STATE]).tolist()
    wanted, first = [], 0
    for rule in rules:
        wanted += [
            first + training_bucket(as_unsigned(id_), input_hash_size=rule.input_hash_size, buckets=rule.buckets)
            for id_ in (*ids, *EDGES)
        ]
        first += rule.buckets
    assert found == wanted


@given(st.integers(1, 9), st.lists(IDS, max_size=20))
def test_the_floor_modulo_is_that_of_the_signed_id(count, ids):
    state = bucket_rule([buckets_of(count, 0, floor=True)])
    asked = torch.tensor([*ids, *EDGES], dtype=torch.int64)
    found = find_bucket(asked, torch.tensor([len(asked)]), [state[name] for name in BUCKET_STATE])
    assert found.tolist() == [id_ % count for id_ in asked.tolist()]


@pytest.mark.parametrize("units", [[1, 2, 3], [2, 2, 2], [5, 1, 1]])
def test_a_wide_row_is_its_units_one_after_the_other(units):
    starts, stops = torch.tensor([0, 4, 2]), torch.tensor([3, 6, 2])
    offsets = torch.tensor([10, 20, 30])
    state = [starts, stops, offsets, torch.tensor(units)]
    ids, lengths = torch.tensor([2, -1, 4, 5, 6, 2]), torch.tensor([2, 3, 1])
    first_local, row_ids, hits = WideRemap()(ids, lengths, state)
    local = AllUnits()(first_local, ids, lengths, state)
    assert hits.tolist() == [True, False, True, True, False, False]
    assert row_ids.tolist() == [2, -1, 4, 5, -1, -1]
    first = [2 * units[0] + 10, 0, 4 * units[1] + 20, 5 * units[1] + 20, 0, 0]
    each = [units[0], units[0], units[1], units[1], units[1], units[2]]
    assert local.tolist() == [start + at for start, count in zip(first, each, strict=True) for at in range(count)]
