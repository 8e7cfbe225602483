"""Laws of routing and merging, for every shard count and placement."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.contract import NO_ROW, Routing, as_unsigned, even_row_ranges, hash_shard, mix64
from service import spreading
from service.dedup import dedup_ids
from service.reply import assemble_reply
from service.types import Output
from tests.manifests import homes_of
from tests.service.routed import any_id, cases

POISON = -99


@given(st.lists(any_id, max_size=300))
def test_expand_of_dedup_is_the_input(ids):
    ids_N = np.array(ids, dtype=np.int64)
    unique_U, inverse_N = dedup_ids(ids_N)
    assert np.array_equal(unique_U[inverse_N], ids_N)
    assert len(set(unique_U.tolist())) == unique_U.size


@given(st.lists(any_id, min_size=1, max_size=50), st.integers(1, 9))
def test_the_vector_rule_is_the_scalar_rule(ids, num_shards):
    vector = hash_shard(np.array(ids, dtype=np.int64).view(np.uint64), num_shards)
    assert vector.tolist() == [hash_shard(as_unsigned(i), num_shards) for i in ids]


def test_mix64_is_splitmix64s_finaliser():
    # First outputs of splitmix64 seeded with 0: the finaliser of the multiples of the golden gamma.
    gamma = 0x9E3779B97F4A7C15
    outputs = [mix64(as_unsigned(gamma * k)) for k in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("stride", [1, 2, 1024, 2**32, 2**48])
def test_hash_routing_spreads_patterned_ids_evenly(stride):
    ids = (
        (np.arange(40_000, dtype=np.uint64) * np.uint64(stride))
        if stride < 2**48
        else np.arange(40_000, dtype=np.uint64) << np.uint64(40)
    )
    share = np.bincount(hash_shard(ids, 5).astype(np.int64), minlength=5) / ids.size
    assert share.max() < 0.21


@pytest.mark.parametrize(
    ("rows", "shards", "counts"),
    [(10, 4, [3, 3, 3, 1]), (10, 6, [2, 2, 2, 2, 2, 0]), (1, 3, [1, 0, 0]), (7, 1, [7])],
)
def test_even_row_ranges_cut_like_torchrec(rows, shards, counts):
    assert [stop - start for start, stop in even_row_ranges(rows, shards)] == counts


@settings(max_examples=300)
@given(st.data(), cases(), st.sampled_from([1, 4, 1024]))
def test_merge_of_route_is_the_direct_lookup_whatever_the_shards_and_whichever_answer(data, case, worth_a_call):
    num_shards = case.version.num_shards
    avoid = data.draw(st.frozensets(st.integers(0, num_shards - 1)))
    lost = data.draw(st.frozensets(st.integers(0, num_shards - 1)))
    order = [shard for shard in data.draw(st.permutations(range(num_shards))) if shard not in lost]
    with patch.object(spreading, "WORTH_A_CALL", worth_a_call):
        batch = case.prepare(avoid=avoid)
    poison(batch)
    case.answer(batch, order)
    sent = case.sent(batch)
    for index, asked in enumerate(case.requests):
        ids, expected = case.ids(asked), case.lookup(asked)
        assert batch.shards_R[index] == {shard for one in ids for shard in sent[one]}
        reply = assemble_reply(batch, index, batch.shards_R[index] & lost)
        outputs = reply.outputs
        missing = np.array([bool(lost.intersection(sent[one])) for one in ids], dtype=np.bool_)
        assert reply.embedding_names_E == tuple(name for _, name, _ in case.blocks(asked))
        assert np.array_equal(outputs[Output.MISSING], missing)
        rows = np.where(missing[:, None], np.float32(0), expected[Output.EMBEDDINGS])
        assert outputs[Output.EMBEDDINGS].tobytes() == rows.tobytes()
        assert np.array_equal(outputs[Output.ROW_IDS], np.where(missing, NO_ROW, expected[Output.ROW_IDS]))
        assert np.array_equal(outputs[Output.HITS], expected[Output.HITS] & ~missing)
        assert np.array_equal(outputs[Output.OUTPUT_LENGTHS], expected[Output.OUTPUT_LENGTHS])
        unique, inverse = outputs[Output.UNIQUE_EMBEDDINGS], outputs[Output.INVERSE]
        assert unique[inverse].tobytes() == rows.tobytes()
        assert set(inverse.tolist()) == set(range(len(unique)))


@settings(max_examples=300)
@given(st.data(), cases())
def test_every_number_is_written_once_and_every_id_sent_where_it_has_to_be(data, case):
    avoid = data.draw(st.frozensets(st.integers(0, case.version.num_shards - 1)))
    batch = case.prepare(avoid=avoid)
    written = [np.zeros(array.shape, dtype=int) for array in (batch.embeddings_UD, batch.row_ids_U, batch.hits_U)]
    for shard in range(case.version.num_shards):
        poison(batch)
        case.answer(batch, [shard])
        written[0] += ~np.isnan(batch.embeddings_UD)
        written[1] += batch.row_ids_U != POISON
        written[2] += batch.hits_U != POISON
    assert all((times == 1).all() for times in written)
    for (name, one), shards in case.sent(batch).items():
        table = case.manifest.table(name)
        homes = homes_of(table, one, case.version.num_shards)
        if table.routing is Routing.COLUMNS:
            assert sorted(shards) == sorted(homes)
        else:
            (shard,) = shards
            assert shard in ((homes - avoid or homes) if table.routing is Routing.REPLICATED else homes)


@settings(max_examples=300)
@given(cases())
def test_dedup_or_not_the_answer_is_the_same_to_the_byte(case):
    everyone = range(case.version.num_shards)
    plain = case.prepare()
    with patch("service.batch.dedup_ids", lambda ids_N: (ids_N, np.arange(ids_N.size))):
        whole = case.prepare()
    assert sum(whole.unique_T) == sum(whole.ids_T) == sum(plain.ids_T)
    for batch in (plain, whole):
        case.answer(batch, everyone)
    for index in range(len(case.requests)):
        assert in_bytes(assemble_reply(plain, index)) == in_bytes(assemble_reply(whole, index))


@settings(max_examples=300)
@given(cases())
def test_an_answer_does_not_depend_on_the_requests_before_it_or_beside_it(case):
    everyone = range(case.version.num_shards)
    together = case.prepare()
    case.answer(together, everyone)
    for index in range(len(case.requests)):
        alone = case.prepare(index)
        case.answer(alone, everyone)
        assert in_bytes(assemble_reply(alone, 0)) == in_bytes(assemble_reply(together, index))


def poison(batch):
    """Fill the buffers with what no shard answers."""
    batch.embeddings_UD = np.full_like(batch.embeddings_UD, np.nan)
    batch.row_ids_U = np.full_like(batch.row_ids_U, POISON)
    batch.hits_U = np.full(batch.hits_U.shape, POISON, dtype=np.int8)


def in_bytes(reply):
    """What a reply says; its unique form written out, for in which order it lists the rows is open."""
    outputs = dict(reply.outputs)
    outputs[Output.UNIQUE_EMBEDDINGS] = outputs[Output.UNIQUE_EMBEDDINGS][outputs.pop(Output.INVERSE)]
    return {output: (array.dtype, array.shape, array.tobytes()) for output, array in outputs.items()}
