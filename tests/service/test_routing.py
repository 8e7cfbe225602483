"""Laws of routing and merging, for every shard count and placement."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.contract import Routing, as_unsigned, even_row_ranges, hash_shard, mix64
from service.batch import place_reply, prepare_batch
from service.dedup import dedup_ids
from service.reply import assemble_reply
from service.types import LookupRequest, Output
from service.validate import Limits, validate
from tests.manifests import RuleShard, hit_of, make_table, make_version, row_id_of, row_of

LIMITS = Limits(max_ids=10_000_000, max_reply_bytes=1 << 40)
ALL = frozenset(Output)
any_id = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.sampled_from([-1, 0, 1, 2**63 - 1, -(2**63)]), st.integers(0, 20)
)
row_number = st.integers(0, 99)


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


@st.composite
def cases(draw):
    num_shards = draw(st.integers(1, 8))
    routing = draw(st.permutations([Routing.HASH, Routing.ROWS, Routing.TABLE]))
    counts = None
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, 100), min_size=num_shards - 1, max_size=num_shards - 1)))
        counts = np.diff([0, *cuts, 100]).tolist()
    tables = [
        make_table(
            f"t{i}",
            [f"f{i}", f"g{i}", "both"] if i < 2 else [f"f{i}", f"g{i}"],
            routing=kind,
            num_shards=num_shards,
            home=draw(st.integers(0, num_shards - 1)),
            shared=["both"],
            row_counts=counts,
        )
        for i, kind in enumerate(routing)
    ]
    # "both" goes to two tables; it has to be an id that either would take.
    managed = {f for table in tables if table.zch is not None for f in table.features} - {"both"}
    requests = []
    keys = [f for table in tables for f in table.features if f != "both"] + ["both"]
    for _ in range(draw(st.integers(1, 4))):
        order = draw(st.permutations(keys))
        batch_size = draw(st.integers(0, 3))
        lengths = [[draw(st.integers(0, 4)) for _ in range(batch_size)] for _ in order]
        values = [
            draw(any_id if key in managed else row_number)
            for key, lens in zip(order, lengths, strict=True)
            for _ in range(sum(lens))
        ]
        requests.append((order, np.array(values, dtype=np.int64), np.array(lengths, dtype=np.int64)))
    return num_shards, tables, requests, draw(st.permutations(range(num_shards)))


@given(cases())
def test_merge_of_route_is_the_direct_lookup_whatever_the_shards_and_their_order(case):
    num_shards, tables, raw, answer_order = case
    manifest, version = make_version(tables, num_shards)
    valid = [
        validate(
            LookupRequest(collection="clicks", keys=tuple(order), values_N=values, lengths_FB=lengths, outputs=ALL),
            version,
            LIMITS,
        )
        for order, values, lengths in raw
    ]
    batch = prepare_batch(version, valid)
    batch.embeddings_UD[:] = np.nan  # poison: a row that nobody writes shows
    batch.row_ids_U[:] = -99
    batch.hits_U[:] = True
    written = np.zeros(batch.embeddings_UD.shape[0], dtype=int)
    for shard in answer_order:
        request = batch.shard_request(shard)
        if request.ids_N.size:
            place_reply(batch, shard, RuleShard(manifest, shard).answer(request))
            written[batch.route.offsets_S1[shard] : batch.route.offsets_S1[shard + 1]] += 1
    assert (written == 1).all()
    by_feature = {}
    for table in tables:
        for feature, name in zip(table.features, table.embedding_names, strict=True):
            by_feature.setdefault(feature, []).append((table.name, name))
    for index, (order, values, lengths) in enumerate(raw):
        reply = assemble_reply(batch, index)
        ids = dict(zip(order, np.split(values, np.cumsum(lengths.sum(axis=1))[:-1]), strict=True))
        blocks = [(table, name, ids[key], i) for i, key in enumerate(order) for table, name in by_feature[key]]
        flat = np.concatenate([block[2] for block in blocks])
        expected = np.concatenate([row_of(table, block) for table, _, block, _ in blocks])
        assert reply.embedding_names_E == tuple(name for _, name, _, _ in blocks)
        assert np.array_equal(reply.outputs[Output.EMBEDDINGS], expected)
        assert np.array_equal(reply.outputs[Output.ROW_IDS], row_id_of(flat))
        assert np.array_equal(reply.outputs[Output.HITS], hit_of(flat))
        assert not reply.outputs[Output.MISSING].any()
        unique, inverse = reply.outputs[Output.UNIQUE_EMBEDDINGS], reply.outputs[Output.INVERSE]
        assert np.array_equal(unique[inverse], expected)
        assert set(inverse.tolist()) == set(range(len(unique)))
        assert np.array_equal(reply.lengths_EB, np.stack([lengths[i] for *_, i in blocks]))
        assert np.array_equal(reply.outputs[Output.OUTPUT_LENGTHS], reply.lengths_EB.reshape(-1))
