import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.shapes import FEATURE, build_full_map, map_of, weight_of

NUM_IDS = 9000


def test_the_map_is_full_and_sorted_and_every_row_but_the_last_is_given_out():
    module = build_full_map(NUM_IDS, dim=3)
    ids, rows = map_of(module)
    assert (ids[1:] > ids[:-1]).all()
    assert (ids < 0).any()
    assert (ids > 2**62).any()
    assert sorted(rows.tolist()) == list(range(NUM_IDS))
    (collision,) = module._managed_collision_collection._managed_collision_modules.values()
    assert collision.open_slots() == 0
    assert collision._mch_sorted_raw_ids[-1] == 2**63 - 1


def test_no_two_rows_and_no_two_columns_are_alike():
    weight = weight_of(build_full_map(NUM_IDS, dim=3))
    assert weight.shape == (NUM_IDS + 1, 3)
    assert len(torch.unique(weight, dim=0)) == NUM_IDS + 1
    assert len(torch.unique(weight, dim=1).T) == 3


def test_torchrec_itself_answers_from_it():
    module = build_full_map(NUM_IDS, dim=3)
    ids, rows = map_of(module)
    unknown = ids[5:6] + 1
    kjt = KeyedJaggedTensor(keys=[FEATURE], values=torch.cat([ids[:5], unknown]), lengths=torch.tensor([6]))
    with torch.no_grad():
        answer = module(kjt)[0][FEATURE].values()
    assert torch.equal(answer, weight_of(module)[torch.cat([rows[:5], torch.tensor([NUM_IDS])])])
