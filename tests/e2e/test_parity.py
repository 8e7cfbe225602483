"""The trainer's own answers through HTTP, gRPC and Triton: generated collections × generated requests, bit for bit.

``tests/parity`` generates both. What runs by default covers every pair of values of every dimension; the whole matrix of
training ranks and shard counts is minutes long, and a ``make soak`` of full length runs it.
"""

import os

import pytest

from tests.e2e.serving import serve
from tests.parity.exports import MANAGED, PLAIN, export_all, resharded
from tests.parity.ranks import WORLDS
from tests.parity.run import Run
from tests.parity.wire import Clients

pytestmark = pytest.mark.e2e

NAMES = [export.name for export in (*PLAIN, *MANAGED)]


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_is_the_trainers(name, parity, tally):
    tally.count(parity.collections[name], parity.check(name))


def test_the_answers_do_not_depend_on_the_stream(parity):
    for name in NAMES:
        if (name, 0) not in parity.answered:
            parity.check(name)
    assert parity.stream(seed=1, threads=8) == []


def test_the_suite_is_as_large_as_was_promised(parity):
    assert sum(map(len, parity.requests.values())) >= 500


@pytest.mark.slow
@pytest.mark.skipif(
    float(os.environ.get("KJTSERVE_SOAK_S", "300")) < 100, reason="the short soak leaves the matrix out"
)
@pytest.mark.parametrize("world", WORLDS)
def test_a_collection_of_any_number_of_ranks_answers_the_same_from_any_number_of_shards(
    world, trained_on_ranks, tmp_path, tally
):
    collections = export_all(tmp_path / "repo", resharded(world), trained_on_ranks)
    with serve(tmp_path / "repo", tmp_path / "serve.log") as serving:
        run = Run(collections, Clients(http=serving.http, grpc=serving.grpc))
        for name, collection in collections.items():
            tally.count(collection, run.check(name))
