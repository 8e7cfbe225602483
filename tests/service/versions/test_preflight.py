"""A version is let in only by the answers that were exported with it, from every replica of every shard."""

import shutil

import numpy as np
import pytest

from export import export_collection
from export.contract import RepositoryError, read_manifest
from service.catalog import load_version
from service.errors import ErrorCode
from service.shards import ShardFailed, ShardReply
from service.versions.preflight import NotYet, Refused, read_probes, try_out
from tests.modules import managed_collection


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    export_collection(managed_collection(), repo, name="c", num_shards=2)
    return repo


@pytest.fixture(scope="module")
def probes(published):
    return read_probes(published, read_manifest(published, "c", 1), load_version(published, "c", 1))


class Replica:
    """Answers its probes as they were exported, after some failures."""

    def __init__(self, probes, *failures, change=lambda reply: reply):
        self.probes, self.failures, self.change, self.asked = probes, list(failures), change, []

    async def lookup(self, request, *, timeout_s):
        self.asked.append(request)
        if self.failures:
            raise self.failures.pop(0)
        reply = ShardReply(
            embeddings_RW=self.probes.embeddings_RW.copy(),
            row_ids_N=self.probes.row_ids_N.copy(),
            hits_N=self.probes.hits_N.copy(),
        )
        return self.change(reply) or reply


def replicas(probes, *last):
    return [[Replica(probes[0])], [Replica(probes[1]), *last]]


def test_probes_are_of_every_kind_and_marked_as_such(probes):
    for each in probes:
        assert each.request.probe
        assert each.request.ids_N.size
        assert set(each.hits_N.tolist()) == {True, False}


async def test_all_replicas_that_answer_rightly_let_a_version_in(probes):
    asked = replicas(probes, Replica(probes[1]))
    await try_out(probes, asked, timeout_s=1)
    assert all(len(replica.asked) == 1 for shard in asked for replica in shard)


async def test_a_replica_that_is_still_mapping_is_asked_again(probes):
    late = Replica(probes[1], *[ShardFailed("busy")] * 5)
    await try_out(probes, replicas(probes, late), timeout_s=5)
    assert len(late.asked) == 6


async def test_a_replica_that_does_not_answer_in_time_puts_it_off(probes):
    down = Replica(probes[1], *[ShardFailed("down", details="10.0.0.7: gone")] * 10_000)
    with pytest.raises(NotYet, match=r"c_shard_1: 10\.0\.0\.7: gone"):
        await try_out(probes, replicas(probes, down), timeout_s=0.05)


@pytest.mark.parametrize(
    "failure",
    [
        ShardFailed("it cannot serve this version", details="SHA-256 differs", refused=True),
        ShardFailed("its reply is malformed", code=ErrorCode.INTERNAL, details="SHA-256 differs"),
    ],
)
async def test_a_replica_that_cannot_serve_it_refuses_it_though_another_is_down(probes, failure):
    down = Replica(probes[1], *[ShardFailed("down")] * 10_000)
    with pytest.raises(Refused, match="c_shard_1: SHA-256 differs"):
        await try_out(probes, replicas(probes, down, Replica(probes[1], failure)), timeout_s=0.05)


def one_bit(reply):
    reply.embeddings_RW.view(np.int32)[0, 0] ^= 1


def another_row(reply):
    reply.row_ids_N[-1] += 1


def another_hit(reply):
    reply.hits_N[0] ^= True


@pytest.mark.parametrize(("change", "what"), [(one_bit, "rows"), (another_row, "row ids"), (another_hit, "hits")])
async def test_an_answer_that_differs_refuses_it(probes, change, what):
    with pytest.raises(Refused, match=f"c_shard_1: answers a probe with other {what} than were exported"):
        await try_out(probes, replicas(probes, Replica(probes[1], change=change)), timeout_s=1)


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_probes_that_are_not_whole_are_named(published, tmp_path, damage):
    shutil.copytree(published, tmp_path / "repo", symlinks=True)
    path = tmp_path / "repo/c/1/shard_1/probes.safetensors"
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "flipped":
        content[-1] ^= 1
        path.write_bytes(content)
    repo = tmp_path / "repo"
    with pytest.raises(RepositoryError, match=r"shard_1/probes\.safetensors: "):
        read_probes(repo, read_manifest(repo, "c", 1), load_version(repo, "c", 1))
