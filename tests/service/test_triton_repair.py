"""Holding versions of models, on a stand-in for Triton that keeps the facts which the real one was seen to have."""

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from service import triton_repair
from service.triton_control import ModelState, TritonCallError
from service.triton_repair import SETTLE_S, HeldModels, model_processes
from service.triton_versions import pin_versions, read_config


@dataclass
class FakeTriton:
    """Ready versions and living processes; a load starts what is not ready or was touched, drops what is not asked for."""

    repo: Path
    ready: dict[str, set[int]] = field(default_factory=dict)
    processes: set[tuple[str, int]] = field(default_factory=set)
    seen: dict[tuple[str, int], int] = field(default_factory=dict)
    broken: set[tuple[str, int]] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    starts: list[tuple[str, int]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def load_model(self, address: str, model: str, config: str) -> None:
        self.calls.append(f"load {model}")
        await self.gate.wait()
        asked = read_versions(config)
        ready = self.ready.setdefault(model, set())
        failed = []
        for version in asked & {int(path.name) for path in (self.repo / model).iterdir() if path.name.isdecimal()}:
            changed_ns = (self.repo / model / str(version)).stat().st_mtime_ns
            if version in ready and self.seen[model, version] == changed_ns:
                continue
            if (model, version) in self.broken:
                failed.append(version)
                continue
            ready.add(version)
            self.seen[model, version] = changed_ns
            self.processes.add((model, version))
            self.starts.append((model, version))
        if failed:
            raise TritonCallError(f"versions {failed} did not load")
        for version in ready - asked:
            ready.discard(version)
            self.processes.discard((model, version))

    async def unload_model(self, address: str, model: str) -> None:
        self.calls.append(f"unload {model}")
        self.ready[model] = set()
        self.processes = {(name, version) for name, version in self.processes if name != model}

    async def read_index(self, address: str) -> list[ModelState]:
        broken = [
            ModelState(model=m, version=str(v), ready=False, reason="it is broken\n\nAt:") for m, v in self.broken
        ]
        return broken + [
            ModelState(model=model, version=str(version), ready=True, reason="")
            for model, versions in self.ready.items()
            for version in versions
            if (model, version) not in self.broken
        ]

    def model_processes(self, shm_prefix: str) -> frozenset[tuple[str, int]]:
        return frozenset(self.processes)


def read_versions(config: str) -> set[int]:
    from google.protobuf import json_format
    from tritonclient.grpc import model_config_pb2

    return set(json_format.Parse(config, model_config_pb2.ModelConfig()).version_policy.specific.versions)


@pytest.fixture
async def triton(tmp_path, monkeypatch):
    for version in (1, 2, 3):
        (tmp_path / "one" / str(version)).mkdir(parents=True)
        os.utime(tmp_path / "one" / str(version), (1, 1))
    (tmp_path / "one" / "config.pbtxt").write_text('name: "one" version_policy { latest { num_versions: 2 } }')
    fake = FakeTriton(tmp_path)
    for name in ("load_model", "unload_model", "read_index", "model_processes"):
        monkeypatch.setattr(triton_repair, name, getattr(fake, name))
    return fake


async def holding(triton: FakeTriton, *versions: int, monkeypatch=None) -> HeldModels:
    """Models that were loaded so long ago that a report is not one from before that."""
    held = HeldModels(triton.repo, {"one": versions})
    held.attach("address", "first_")
    if monkeypatch is not None:
        monkeypatch.setattr(triton_repair, "REPAIRED_S", 0.0)
    assert await held.load_all() == {}
    triton.calls.clear()
    triton.starts.clear()
    return held


async def test_what_is_held_is_what_is_loaded_whatever_is_newer(triton, monkeypatch):
    held = await holding(triton, 1, monkeypatch=monkeypatch)
    assert triton.ready == {"one": {1}}
    triton.processes.clear()
    await held.repair("one")
    assert triton.ready == {"one": {1}}
    assert triton.calls == ["load one"]


async def test_a_repair_fails_when_the_held_version_is_not_there_afterwards(triton, monkeypatch):
    held = await holding(triton, 1, 2, monkeypatch=monkeypatch)
    triton.processes.discard(("one", 1))
    (triton.repo / "one" / "1").rmdir()
    with pytest.raises(TritonCallError, match="one version 1 is gone from"):
        await held.repair("one")
    assert ("one", 2) in triton.processes
    assert triton.starts == []


async def test_where_files_cannot_be_touched_only_the_dead_version_is_loaded_anew(triton, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only file system")

    held = await holding(triton, 1, 2, monkeypatch=monkeypatch)
    triton.processes.discard(("one", 1))
    monkeypatch.setattr(triton_repair.os, "utime", refuse)
    await held.repair("one")
    assert triton.starts == [("one", 1)]
    assert triton.ready == {"one": {1, 2}}


async def test_calls_at_the_same_time_are_one_repair_with_one_result(triton, monkeypatch):
    held = await holding(triton, 1, monkeypatch=monkeypatch)
    triton.processes.clear()
    await asyncio.gather(held.repair("one"), held.repair_dead(), held.repair("one"))
    assert triton.calls == ["load one"]

    triton.broken.add(("one", 1))
    triton.processes.clear()
    triton.calls.clear()
    monkeypatch.setattr(triton_repair, "backoff_s", lambda _: 0.0)
    results = await asyncio.gather(held.repair("one"), held.repair("one"), return_exceptions=True)
    assert len(triton.calls) == 1
    assert [str(result) for result in results] == ["versions [1] did not load"] * 2


async def test_a_caller_who_goes_away_does_not_end_the_repair_of_the_others(triton, monkeypatch):
    held = await holding(triton, 1, monkeypatch=monkeypatch)
    triton.processes.clear()
    triton.gate.clear()
    first, second = asyncio.create_task(held.repair("one")), asyncio.create_task(held.repair("one"))
    await until(lambda: triton.calls)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    triton.gate.set()
    await second
    assert triton.processes == {("one", 1)}


async def test_a_repair_that_waits_while_the_server_is_replaced_touches_nothing_of_the_new_one(triton, monkeypatch):
    held = await holding(triton, 1, monkeypatch=monkeypatch)
    waiting = asyncio.Event()
    monkeypatch.setattr(triton_repair, "backoff_s", lambda _: waiting.set() or 0.2)
    triton.processes.clear()
    repair = asyncio.create_task(held.repair("one"))
    await waiting.wait()
    triton.ready.clear()
    held.attach("address", "second_")
    assert await held.load_all() == {}
    await repair
    await asyncio.sleep(0.3)  # longer than the back-off that it was in
    assert triton.calls == ["load one"]
    assert triton.starts == [("one", 1)]


async def test_a_report_from_before_the_last_load_unloads_nothing_and_takes_its_time(triton):
    held = await holding(triton, 1)
    started_s = time.monotonic()
    await held.repair("one")
    assert time.monotonic() - started_s >= SETTLE_S
    assert triton.calls == []


async def test_a_process_that_dies_just_after_a_load_is_repaired_all_the_same(triton):
    held = await holding(triton, 1)
    triton.processes.clear()
    await held.repair("one")
    assert triton.processes == {("one", 1)}


async def test_a_look_begins_the_repair_of_what_is_dead_and_does_not_wait_for_it(triton, monkeypatch):
    held = await holding(triton, 1, 2, monkeypatch=monkeypatch)
    await held.repair_dead()
    assert triton.calls == []
    triton.gate.clear()
    triton.processes.discard(("one", 2))
    await held.repair_dead()
    await held.repair_dead()
    triton.gate.set()
    await until(lambda: ("one", 2) in triton.processes)
    assert triton.starts == [("one", 2)]
    await held.close()


async def test_other_versions_are_loaded_before_those_not_asked_for_are_let_go(triton):
    held = await holding(triton, 1)
    await held.hold("one", [3, 1])
    assert triton.ready == {"one": {1, 3}}
    await held.hold("one", [3])
    assert triton.ready == {"one": {3}}
    assert triton.starts == [("one", 3)]


async def test_a_new_version_that_does_not_load_leaves_what_was_held(triton, monkeypatch):
    held = await holding(triton, 1, monkeypatch=monkeypatch)
    triton.broken.add(("one", 2))
    with pytest.raises(TritonCallError, match=r"^version 2: it is broken$"):
        await held.hold("one", [2])
    with pytest.raises(TritonCallError, match=r"^version 9: not loaded; is it in "):
        await held.hold("one", [9])
    assert triton.processes == {("one", 1)}
    triton.processes.clear()
    await held.repair("one")
    assert triton.ready == {"one": {1}}


def test_a_failed_look_at_processes_makes_nobody_look_dead(monkeypatch):
    def refuse(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        model_processes("kjtserve_")


def test_the_stand_in_reads_what_is_asked_for(triton):
    assert read_versions(pin_versions(read_config(triton.repo, "one"), [3, 1])) == {1, 3}


async def until(condition) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.005)
