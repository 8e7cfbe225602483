"""Trainer, shards and front tier on machines of their own: versions reach them by ``kjtserve sync`` alone."""

import asyncio
import signal
import subprocess
from contextlib import contextmanager

import pytest

from service.triton import TritonServer
from tests.e2e.serving import KJTSERVE, serve, until
from tests.e2e.test_versions import Trainer, flip, holds, metric, reaches

pytestmark = pytest.mark.e2e


@contextmanager
def syncing(source, dest, log_path, *options):
    """A side-car that looks all the time; it has to end well when told to."""
    command = [KJTSERVE, "sync", source, dest, "--every", "0.2", "--keep", "3", *options]
    with log_path.open("wb") as log, subprocess.Popen(list(map(str, command)), stdout=log, stderr=log) as process:
        try:
            yield
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0, log_path.read_text()[-2000:]
        finally:
            process.kill()


def bring(source, dest, *options):
    done = subprocess.run([KJTSERVE, "sync", source, dest, *options], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{dest}: brought c version 1\n"), done.stderr


async def test_versions_are_brought_loaded_and_taken_up_where_nothing_is_shared(tmp_path):
    source, shards, front = (tmp_path / name for name in ("source", "shards", "front"))
    trainer = Trainer(source, 2)
    trainer.base()
    for dest, option in ((shards, ()), (front, ("--front",))):
        await asyncio.to_thread(bring, source, dest, *option)
    triton = TritonServer(shards, {"c_shard_0": [1], "c_shard_1": [1]})
    await triton.start()
    try:
        await asyncio.to_thread(follow, trainer, tmp_path, triton.grpc_address)
    finally:
        await triton.stop()


def follow(trainer, tmp_path, address):
    source, shards, front = (tmp_path / name for name in ("source", "shards", "front"))
    with (
        syncing(source, shards, tmp_path / "shards.log", "--triton", address),
        syncing(source, front, tmp_path / "front.log", "--front"),
        serve(front, tmp_path / "serve.log", "--shards", address) as serving,
    ):
        assert holds(trainer, serving) == 1
        for step in range(5):
            trainer.train()
            version = trainer.base() if step in {1, 3} else trainer.delta()
            reaches(serving, version, timeout_s=60)
            assert holds(trainer, serving) == version
        trainer.train()
        version = trainer.delta()
        flip(source / "c" / str(version) / "shard_0" / "overlay.safetensors")
        until(lambda: b"not what was exported" in (tmp_path / "shards.log").read_bytes(), 60, "the damage is told")
        assert metric(serving, "kjtserve_version") == version - 1
        assert holds(trainer, serving) == version - 1
        flip(source / "c" / str(version) / "shard_0" / "overlay.safetensors")
        reaches(serving, version, timeout_s=90)
        assert holds(trainer, serving) == version
