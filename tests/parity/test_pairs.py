"""Generated combinations are complete."""

import itertools

from tests.parity.pairs import accepted, cover

DIMENSIONS = {"a": (1, 2, 3), "b": "xyz", "c": (True, False), "d": range(4)}


def refuse(choice):
    return "because" if choice["a"] == 1 and choice["c"] else None


def test_every_pair_of_values_that_is_accepted_is_in_the_cover():
    everything, chosen = accepted(DIMENSIONS, refuse), cover(DIMENSIONS, refuse)
    assert len(everything) == 3 * 3 * 2 * 4 - 3 * 4
    assert len(chosen) < len(everything) / 3
    assert all(refuse(choice) is None for choice in chosen)
    for names in itertools.combinations(DIMENSIONS, 2):
        assert {tuple(c[n] for n in names) for c in chosen} == {tuple(c[n] for n in names) for c in everything}
