"""Variable batches: written out, they are what the client could have sent; whatever breaks a rule is named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidArgument, TooLarge
from service.samples import cut_samples, write_out
from service.types import LookupRequest

KEYS = ("user", "item")


def request_of(values, lengths, **options):
    arrays = {
        name: np.array(value, dtype=np.float32 if name == "weights_N" else np.int64) for name, value in options.items()
    }
    return LookupRequest(
        collection="c",
        keys=KEYS,
        values_N=np.array(values, dtype=np.int64),
        lengths_FB=np.array(lengths, dtype=np.int64),
        **arrays,
    )


@st.composite
def variable_batches(draw):
    """Per feature: samples of ids, and which of them each sample of the full batch is."""
    full = draw(st.integers(0, 5))
    features = []
    for _ in KEYS:
        samples = draw(st.lists(st.lists(st.integers(-9, 9), max_size=3), min_size=1 if full else 0, max_size=4))
        picks = draw(st.lists(st.integers(0, max(len(samples) - 1, 0)), min_size=full, max_size=full))
        features.append((samples, picks))
    return features


@given(variable_batches())
def test_the_written_out_request_is_the_one_that_the_picks_describe(features):
    samples = [sample for of, _ in features for sample in of]
    values = [id_ for sample in samples for id_ in sample]
    request = request_of(
        values,
        [len(sample) for sample in samples],
        weights_N=np.arange(len(values)) / 7,
        stride_per_key_F=[len(of) for of, _ in features],
        inverse_indices_FB=[picks for _, picks in features],
    )
    cut = cut_samples(request, KEYS, 10_000)
    written = write_out(request)
    picked = [of[pick] for of, picks in features for pick in picks]
    assert written.values_N.tolist() == [id_ for sample in picked for id_ in sample]
    assert written.lengths_FB.reshape(-1).tolist() == [len(sample) for sample in picked]
    assert (written.stride_per_key_F, written.inverse_indices_FB) == (None, None)
    assert list(cut.written_ids_F) == [sum(len(of[pick]) for pick in picks) for of, picks in features]
    assert list(cut.written_lengths_F) == [len(picks) for _, picks in features]
    places = iter(range(len(values)))
    placed = [[[next(places) for _ in sample] for sample in of] for of, _ in features]
    chosen = [at for of, (_, picks) in zip(placed, features, strict=True) for pick in picks for at in of[pick]]
    assert np.array_equal(written.weights_N, (np.array(chosen, dtype=np.int64) / 7).astype(np.float32))


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_inverse_indices_may_be_flat(shape):
    request = request_of([1, 2, 3], [1, 1, 1], stride_per_key_F=[2, 1], inverse_indices_FB=[[1, 0], [0, 0]])
    flat = request_of([1, 2, 3], [1, 1, 1], stride_per_key_F=[2, 1], inverse_indices_FB=np.reshape([1, 0, 0, 0], shape))
    assert write_out(flat).values_N.tolist() == write_out(request).values_N.tolist() == [2, 1, 3, 3]


def test_strides_alone_keep_each_features_own_samples():
    cut = cut_samples(request_of([1, 2, 3, 4], [2, 0, 1, 1], stride_per_key_F=[1, 3]), KEYS, 100)
    assert [lengths.tolist() for lengths in cut.lengths_F] == [[2], [0, 1, 1]]
    assert cut.stops_F1 == (0, 2, 4)
    assert (cut.written_ids_F, cut.written_lengths_F) == ((2, 2), (1, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride_per_key_F": [3]}, r"stride_per_key: shape \[1\], but there are 2 keys"),
        ({"stride_per_key_F": [-1, 4]}, "stride_per_key: -1 for key 'user'"),
        ({"stride_per_key_F": [2**62, 2**62]}, "stride_per_key: 4611686018427387904 for key"),
        ({"stride_per_key_F": [2, 2]}, "stride_per_key: they add up to 4, but there are 3 lengths"),
        ({"inverse_indices_FB": [[0], [0]]}, "inverse_indices: sent without stride_per_key"),
        (
            {"stride_per_key_F": [2, 1], "inverse_indices_FB": [[0, 2], [0, 0]]},
            "inverse_indices: 2 for key 'user', sample 1",
        ),
        ({"stride_per_key_F": [2, 1], "inverse_indices_FB": [[0, 1], [0, -1]]}, "inverse_indices: -1 for key 'item'"),
        ({"stride_per_key_F": [2, 1], "inverse_indices_FB": [0, 1, 0]}, r"inverse_indices: shape \[3\]"),
        ({"stride_per_key_F": [3, 0], "inverse_indices_FB": [[0], [0]]}, "inverse_indices: 0 for key 'item'"),
    ],
)
def test_a_broken_rule_is_named(options, message):
    with pytest.raises(InvalidArgument, match=message):
        cut_samples(request_of([1, 2, 3], [1, 1, 1], **options), KEYS, 100)


def test_a_small_request_that_writes_out_to_a_large_one_is_refused_before_it_grows():
    request = request_of(
        range(50), [50, 0], stride_per_key_F=[1, 1], inverse_indices_FB=np.zeros((2, 1000), dtype=np.int64)
    )
    with pytest.raises(
        TooLarge, match="inverse_indices: written out to 1000 samples for each key, the values are 50000 ids"
    ):
        cut_samples(request, KEYS, 10_000)
    with pytest.raises(TooLarge, match="inverse_indices: 2000 entries, the limit is 1000"):
        cut_samples(request, KEYS, 1000)
