"""Versions change under the real stack: deltas with evictions, bases, faults and rollbacks, and requests go on."""

import json
import shutil
import urllib.request

import numpy as np
import pytest

from export import export_collection, export_delta
from export.contract import shard_dir, version_dir, write_pin
from tests.e2e.serving import command_of, serve, until
from tests.e2e.test_metrics import scrape, total
from tests.export.reader import expected
from tests.modules import managed_collection, map_of, train, untrained_collection
from tests.training import Loop

pytestmark = pytest.mark.e2e
TABLES = ("user", "item")


class Trainer:
    """A module that goes on training, the repository that it publishes into, and what each version has to answer."""

    def __init__(self, repo, num_shards):
        self.repo, self.num_shards, self.steps = repo, num_shards, 0
        self.module = managed_collection({"user": 60, "item": 40}, {"user": ["user"], "item": ["item"]})
        self.history = []
        self.answers = {}
        self.evicted = dict.fromkeys(TABLES, 0)
        self.maps = {}

    def train(self):
        train(self.module, steps=2, seed=self.steps + 1, first_step=12 + 2 * self.steps)
        self.steps += 1

    def base(self, **options):
        return self._published(
            export_collection(self.module, self.repo, name="c", num_shards=self.num_shards, **options)
        )

    def delta(self):
        return self._published(export_delta(self.module, self.repo, name="c"))

    def _published(self, manifest):
        now = {table: map_of(self.module, table) for table in TABLES}
        for table, held in self.maps.items():
            self.evicted[table] += len(set(held) - set(now[table]))
        self.maps = now
        self.history += [id_ for table in TABLES for id_ in now[table] if id_ not in self.history]
        self.answers[manifest.version] = {
            table: dict(zip(self.history, expected(self.module, table, self.history), strict=True)) for table in TABLES
        }
        return manifest.version


def ask(serving, ids, version=None):
    """(version, answers by table) of ids, in both features."""
    body = {"features": {table: [ids] for table in TABLES}, "row_ids": True, "hits": True}
    if version is not None:
        body["version"] = version
    request = urllib.request.Request(f"{serving.http_url}/v1/collections/c:lookup", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=20) as response:
        reply = json.load(response)
    found = {}
    for table in TABLES:
        rows = np.array(reply["embeddings"][table][0], dtype=np.float32)
        numbers = zip(rows, reply["row_ids"][table][0], reply["hits"][table][0], strict=True)
        found[table] = {id_: (row.tobytes(), *rest) for id_, (row, *rest) in zip(ids, numbers, strict=True)}
    return reply["version"], found


def holds(trainer, serving, version=None):
    """The answers are those of the version that the reply names."""
    ids = trainer.history[:400]
    named, found = ask(serving, ids, version)
    wanted = trainer.answers[named]
    for table in TABLES:
        for id_ in ids:
            if id_ in wanted[table]:
                assert found[table][id_] == wanted[table][id_], (named, table, id_)
    return named


def metric(serving, name, **labels):
    page = serving.get("/metrics")[1]
    for line in page.splitlines():
        if line.startswith(name) and all(f'{key}="{value}"' for key, value in labels.items()):
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(f'{key}="{value_}"' in head for key, value_ in labels.items()):
                return float(value)
    raise AssertionError(f"{name} {labels} is not on the page")


def reaches(serving, version, timeout_s=60):
    until(lambda: metric(serving, "kjtserve_version", collection="c") == version, timeout_s, f"version {version}")


@pytest.fixture(params=[2])
def running(request, tmp_path):
    trainer = Trainer(tmp_path / "repo", request.param)
    trainer.base()
    with serve(trainer.repo, tmp_path / "serve.log") as serving:
        yield trainer, serving


def test_deltas_and_bases_are_taken_up_with_their_evictions(running):
    trainer, serving = running
    assert holds(trainer, serving) == 1
    for step in range(4):
        trainer.train()
        version = trainer.base() if step == 2 else trainer.delta()
        reaches(serving, version)
        assert holds(trainer, serving) == version
        assert holds(trainer, serving, version=version - 1) == version - 1
        for table in TABLES:
            assert metric(serving, "kjtserve_evictions_total", table=table) == trainer.evicted[table]
    assert all(trainer.evicted.values())
    assert metric(serving, "kjtserve_version_switches_total", result="ok") == 5
    assert metric(serving, "kjtserve_version_switches_total", result="failed") == 0
    assert metric(serving, "kjtserve_newest_version") == version
    assert metric(serving, "kjtserve_version_lag_seconds") == 0
    assert metric(serving, "kjtserve_publish_to_served_seconds_count") == 4
    assert metric(serving, "kjtserve_overlay_bytes") > 0


def test_a_version_with_another_number_of_shards_is_taken_up(running):
    trainer, serving = running
    for num_shards in (3, 1):
        trainer.num_shards = num_shards
        trainer.train()
        version = trainer.base()
        reaches(serving, version)
        assert holds(trainer, serving) == version
        assert metric(serving, "kjtserve_version_switches_total", result="failed") == 0
    models = {line.split("/")[-3] for line in map(str, stubs(serving))}
    assert models == {"c_shard_0", "c_shard_1", "c_shard_2"}, "the version before, which a rollback needs, has three"


def stubs(serving):
    return [command_of(stub)[1] for stub in stub_processes(serving)]


def test_a_rollback_goes_back_at_once_and_stays_until_it_is_taken_back(running):
    trainer, serving = running
    trainer.train()
    reaches(serving, trainer.delta())
    write_pin(trainer.repo, "c", 1)
    reaches(serving, 1)
    assert holds(trainer, serving) == 1
    assert metric(serving, "kjtserve_version_switches_total", result="rolled_back") == 1
    trainer.train()
    newest = trainer.delta()
    until(lambda: metric(serving, "kjtserve_newest_version") == newest, 20, "the new version is noticed")
    assert holds(trainer, serving) == 1
    assert metric(serving, "kjtserve_version_lag_seconds") > 0
    (trainer.repo / "c" / "pin.json").write_text("{")  # what cannot be read changes nothing
    serving.await_event("pin_unreadable", timeout_s=20)
    assert holds(trainer, serving) == 1
    write_pin(trainer.repo, "c", None)
    reaches(serving, newest)
    assert holds(trainer, serving) == newest
    for table in TABLES:
        assert metric(serving, "kjtserve_evictions_total", table=table) == trainer.evicted[table]


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-8])


FAULTS = {
    "truncated overlay": ("delta", "shard_0/overlay.safetensors", cut, "bytes, the manifest says"),
    "flipped byte of an overlay": ("delta", "shard_1/overlay.safetensors", flip, "SHA-256 differs"),
    "missing shard of a delta": ("delta", "shard_1/overlay.safetensors", lambda path: path.unlink(), "No such file"),
    "truncated state": ("base", "shard_0/state.safetensors", cut, "bytes, the manifest says"),
    "flipped byte of a state": ("base", "shard_1/state.safetensors", flip, "SHA-256 differs"),
    "missing shard of a base": ("base", "shard_1/shard.pt2", lambda path: path.unlink(), "No such file"),
    "probes that are wrong": ("delta", "shard_0/probes.safetensors", flip, "SHA-256 differs"),
}


def test_a_version_at_fault_leaves_the_old_one_serving_and_is_taken_up_once_it_is_put_right(running, tmp_path):
    trainer, serving = running
    before = 1
    for kind, file, damage, words in FAULTS.values():
        trainer.train()
        version, sound = publish_damaged(trainer, tmp_path / f"elsewhere_{before}", kind, file, damage)
        failure = until(
            lambda: [one for one in serving.events("version_switch_failed") if one["version"] == version],  # noqa: B023
            60,
            f"version {version} is refused",
        )[0]
        assert (failure["collection"], failure["serving"]) == ("c", before)
        assert words in failure["reason"]
        assert metric(serving, "kjtserve_version") == before
        assert holds(trainer, serving) == before
        (version_dir(trainer.repo, "c", version) / file).write_bytes(sound)
        reaches(serving, version)
        assert holds(trainer, serving) == version
        before = version
    assert metric(serving, "kjtserve_version_switches_total", result="failed") >= len(FAULTS)


def publish_damaged(trainer, elsewhere, kind, file, damage):
    """Make a version elsewhere, damage a file of it, and publish it as a whole: a front tier looks at all times."""
    shutil.copytree(trainer.repo, elsewhere, symlinks=True)
    here, trainer.repo = trainer.repo, elsewhere
    version = trainer.base() if kind == "base" else trainer.delta()
    trainer.repo = here
    made = version_dir(elsewhere, "c", version)
    sound = (made / file).read_bytes()
    damage(made / file)
    if kind == "base":
        for shard in range(trainer.num_shards):
            (here / f"c_shard_{shard}" / str(version)).symlink_to(f"../c/{version}/shard_{shard}")
    made.rename(version_dir(here, "c", version))
    return version, sound


def test_a_server_that_starts_with_a_broken_newest_version_serves_the_one_before(running, tmp_path):
    trainer, _ = running
    trainer.train()
    version = trainer.delta()
    flip(shard_dir(version_dir(trainer.repo, "c", version), 0) / "overlay.safetensors")
    with serve(trainer.repo, tmp_path / "second.log") as second:
        reaches(second, 1)
        assert holds(trainer, second) == 1
        assert second.events("version_switch_failed")[0]["version"] == version


def on_shards(serving, name, table):
    """A gauge of a table, over all its shards."""
    page = scrape(serving.triton_metrics)
    return total(page, name, collection="c", table=table)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_evictions_and_open_slots_are_torchrecs_own_to_the_last_digit(tmp_path, num_shards):
    module = untrained_collection({"user": 25, "item": 40}, eviction_interval=1)
    loop, maps = Loop(module), module._managed_collision_collection
    export_collection(module, tmp_path / "repo", name="c", num_shards=num_shards)
    counted = dict.fromkeys(TABLES, 0)
    with serve(tmp_path / "repo", tmp_path / "serve.log") as serving:
        before = {table: map_of(module, table) for table in TABLES}
        for _ in range(7):
            named = dict(loop.evicted)
            loop.step()
            version = export_delta(module, tmp_path / "repo", name="c").version
            reaches(serving, version)
            now = {table: map_of(module, table) for table in TABLES}
            ids = sorted({id_ for maps_ in (before, now) for held in maps_.values() for id_ in held})
            answered, found = ask(serving, ids)
            assert answered == version
            for table in TABLES:
                assert list(found[table].values()) == expected(module, table, ids)
                # A row that was free had no id that could be evicted.
                taken = set(now[table].values()) - set(before[table].values())
                counted[table] += loop.evicted[table] - named[table] - len(taken)
                assert metric(serving, "kjtserve_evictions_total", table=table) == counted[table]
                open_slots = int(maps.open_slots()[table])
                until(
                    lambda: on_shards(serving, "kjtserve_zch_open_slots", table) == open_slots,  # noqa: B023
                    20,
                    f"{open_slots} open slots",
                )
                assert on_shards(serving, "kjtserve_zch_rows", table) == len(now[table])
                gone = set(before[table]) - set(now[table])
                assert not any(found[table][id_][2] for id_ in gone)
            before = now
    assert all(counted.values())


def test_a_shard_that_is_killed_while_it_loads_and_a_rollback_meanwhile_leave_the_old_version_serving(running):
    trainer, serving = running
    trainer.train()
    version = trainer.base()
    loading_process(serving, version).kill()
    assert metric(serving, "kjtserve_version") == 1
    assert holds(trainer, serving) == 1
    reaches(serving, version, timeout_s=120)
    assert holds(trainer, serving) == version
    trainer.train()
    newer = trainer.base()
    loading_process(serving, newer)
    write_pin(trainer.repo, "c", version)
    serving.await_event("version_switch_given_up", timeout_s=30)
    assert holds(trainer, serving) == version
    until(
        lambda: not [stub for stub in stub_processes(serving) if f"/{newer}/" in "".join(command_of(stub)[1:2])],
        60,
        "the base that is not wanted is unloaded",
    )
    write_pin(trainer.repo, "c", None)
    reaches(serving, newer, timeout_s=120)
    assert holds(trainer, serving) == newer


def loading_process(serving, version):
    """A model process of a version that is on its way: Triton does not notice one that dies as it is started."""

    def look():
        for stub in stub_processes(serving):
            if f"/{version}/" in "".join(command_of(stub)[1:2]) and stub.memory_info().rss > 80 << 20:
                return stub
        return None

    return until(look, 60, f"a process of version {version}")


def stub_processes(serving):
    found = []
    for child in serving.children():
        command = command_of(child)
        if len(command) > 1 and "triton_python_backend_stub" in command[0]:
            found.append(child)
    return found
