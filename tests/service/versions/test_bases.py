"""A Triton of our own holds just what is needed, checks it first, and knows when it does not know."""

import asyncio

import pytest

from export import export_collection
from export.contract import RepositoryError, UserError
from service.triton_control import TritonCallError
from service.versions.bases import OwnBases
from tests.modules import plain_collection


class FakeTriton:
    """Holds what it is told to; remembers the order."""

    def __init__(self, **failures):
        self.told, self.failures, self.gate = [], failures, None

    async def hold(self, model, versions):
        self.told.append((model, list(versions)))
        if self.gate is not None:
            await self.gate.wait()
        if failure := self.failures.pop(model, None):
            raise failure


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    for _ in range(3):
        export_collection(plain_collection({"t": 4}), repo, name="c", num_shards=2)
    return repo


def bases(*numbers):
    return lambda: {f"c_shard_{shard}": frozenset(numbers) for shard in range(2)}


def held_first(published, triton):
    return OwnBases(published, triton, bases(1)())


async def test_what_is_held_already_is_not_asked_for(published):
    triton = FakeTriton()
    await held_first(published, triton).hold("c", bases(1))
    assert not triton.told


async def test_a_base_that_is_not_needed_goes_before_the_next_one_comes(published):
    triton = FakeTriton()
    own = held_first(published, triton)
    await own.hold("c", bases(1, 2))
    await own.hold("c", bases(2, 3))
    assert [told for told in triton.told if told[0] == "c_shard_0"] == [
        ("c_shard_0", [1, 2]),
        ("c_shard_0", [2]),
        ("c_shard_0", [2, 3]),
    ]


async def test_models_of_other_shard_counts_come_and_go(published):
    triton = FakeTriton()
    own = held_first(published, triton)
    await own.hold("c", lambda: {"c_shard_0": frozenset({1, 2})})
    assert sorted(triton.told) == [("c_shard_0", [1, 2]), ("c_shard_1", [])]
    await own.hold("other", dict)
    assert len(triton.told) == 2, "other collections are nobody's business here"


async def test_a_damaged_base_is_refused_before_triton_hears_of_it(published):
    path = published / "c/3/shard_1/state.safetensors"
    sound = path.read_bytes()
    triton = FakeTriton()
    try:
        path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        with pytest.raises(RepositoryError, match=r"shard_1/state\.safetensors: its SHA-256 differs"):
            await held_first(published, triton).hold("c", bases(1, 3))
    finally:
        path.write_bytes(sound)
    assert not triton.told


async def test_after_a_failure_it_is_asked_for_again(published):
    triton = FakeTriton(c_shard_1=TritonCallError("no memory"))
    own = held_first(published, triton)
    with pytest.raises(UserError, match="c_shard_1: no memory"):
        await own.hold("c", bases(1, 2))
    triton.told.clear()
    await own.hold("c", bases(1))
    assert sorted(triton.told) == [("c_shard_0", [1]), ("c_shard_0", [1]), ("c_shard_1", [1])]


async def test_a_change_that_is_called_off_is_put_right_by_the_next(published):
    triton = FakeTriton()
    triton.gate = asyncio.Event()
    own = held_first(published, triton)
    change = asyncio.create_task(own.hold("c", bases(1, 2)))
    while len(triton.told) < 2:
        await asyncio.sleep(0.001)
    change.cancel()
    await asyncio.gather(change, return_exceptions=True)
    triton.gate = None
    triton.told.clear()
    await own.hold("c", bases(1))
    assert sorted(triton.told) == [("c_shard_0", [1]), ("c_shard_1", [1])]
