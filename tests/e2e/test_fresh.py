"""A module trains on and publishes while clients ask: every reply is the trainer's, of the one version that it names.

``make soak`` runs it for minutes, CI for ``KJTSERVE_SOAK_S`` seconds.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio

from tests.e2e.fresh_trainer import spread_id
from tests.e2e.serving import serve
from tests.e2e.test_metrics import scrape, total

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

SECONDS = float(os.environ.get("KJTSERVE_SOAK_S", "300"))
EVERY_S = min(5.0, SECONDS / 6)
BASE_EVERY_S = min(60.0, SECONDS / 2.5)
RATE = 200
"""Requests a second, half of them over each protocol."""
CANDIDATES_SHARE = 0.02
"""One request in so many asks for 2,048 candidates, the others for a user's N(100, 25) items."""
TABLES = ("user", "item")


class Oracle:
    """What the module answered at each version."""

    def __init__(self, folder):
        self.folder, self.versions = folder, {}

    async def of(self, version):
        """The trainer saves it when the version is published, which a front tier may notice first."""
        if version not in self.versions:
            path = self.folder / f"{version}.npz"
            deadline = time.monotonic() + 30
            while not path.exists():
                assert time.monotonic() < deadline, f"nobody said what version {version} answers"
                await asyncio.sleep(0.05)
            self.versions[version] = dict(np.load(path))
            for old in sorted(self.versions)[:-6]:
                del self.versions[old]
        return self.versions[version]

    @staticmethod
    def answer(held, table, ids):
        known, rows, weight = (held[f"{table}_{part}"] for part in ("ids", "rows", "weight"))
        at = np.searchsorted(known, ids).clip(max=len(known) - 1)
        hits = known[at] == ids
        row_ids = np.where(hits, rows[at], len(weight) - 1)
        return weight[row_ids], row_ids, hits


class Load:
    def __init__(self, serving, oracle, window):
        self.serving, self.oracle, self.window = serving, oracle, window
        self.asked: list[tuple[float, float]] = []
        self.versions: Counter[int] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.rows = self.unknown = 0
        self.tasks: set[asyncio.Task] = set()

    def draw(self, rng):
        size = 2048 if rng.random() < CANDIDATES_SHARE else max(1, int(rng.normal(100, 25)))
        users = rng.integers(0, self.window // 4 + 200, max(1, size // 50))
        items = rng.integers(max(0, self.window - 9000), self.window + 800, size)
        ids = [np.array([spread_id(int(one)) for one in part], dtype=np.int64) for part in (users, items)]
        return np.concatenate(ids), np.array([len(part) for part in ids], dtype=np.int64)

    async def ask(self, client, api, rng, due):
        values, lengths = self.draw(rng)
        tensors = []
        for name, array in (("values", values), ("lengths", lengths)):
            tensors.append(api.InferInput(name, list(array.shape), "INT64"))
            tensors[-1].set_data_from_numpy(array)
        outputs = [api.InferRequestedOutput(name) for name in ("embeddings", "row_ids", "hits")]
        try:
            result = await client.infer("c", tensors, outputs=outputs)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is a failed request
            self.outcomes[f"{type(exc).__name__}: {exc}"[:200]] += 1
            return
        self.asked.append((due, time.monotonic()))
        response = result.get_response()
        version = int(response["model_version"] if isinstance(response, dict) else response.model_version)
        held = await self.oracle.of(version)
        parts = [
            Oracle.answer(held, table, ids) for table, ids in zip(TABLES, np.split(values, lengths[:1]), strict=True)
        ]
        for name, wanted in zip(("embeddings", "row_ids", "hits"), zip(*parts, strict=True), strict=True):
            if not np.array_equal(result.as_numpy(name), np.concatenate(wanted)):
                self.outcomes[f"{name} are not those of version {version}"] += 1
                return
        self.outcomes["ok"] += 1
        self.versions[version] += 1
        self.rows += len(values)
        self.unknown += len(values) - int(sum(part[2].sum() for part in parts))
        self.window = int(held["window"])

    async def run(self, seconds):
        """Poisson arrivals, whether earlier requests are answered or not."""
        rng = np.random.default_rng(0)
        async with (
            triton_http_aio.InferenceServerClient(self.serving.http, conn_limit=200) as over_http,
            triton_grpc_aio.InferenceServerClient(self.serving.grpc) as over_grpc,
        ):
            due = time.monotonic()
            end = due + seconds
            while due < end:
                due += rng.exponential(1 / RATE)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                client, api = (over_http, triton_http) if rng.random() < 0.5 else (over_grpc, triton_grpc)
                task = asyncio.create_task(self.ask(client, api, rng, due))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            await asyncio.gather(*self.tasks)


def switches(serving):
    """(begin, end) of every switch on the monotonic clock, and the versions."""
    offset = time.monotonic() - time.time()
    found = []
    for event in serving.events("version_switched"):
        end = np.datetime64(event["timestamp"].rstrip("Z")).astype("datetime64[us]").astype(np.int64) / 1e6 + offset
        found.append((end - event["load_s"] - event["preflight_s"], end, event))
    return found


def memory(serving):
    """RSS and file descriptors of the front tier and of every process under it, by what it is."""
    found = Counter()
    for process in [psutil.Process(serving.process.pid), *serving.children()]:
        try:
            name = process.name()
            found[f"{name} rss"] += process.memory_info().rss
            found[f"{name} fds"] += process.num_fds()
        except psutil.NoSuchProcess:
            continue
    return found


@contextmanager
def training(command, log_path):
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as trainer,
    ):
        try:
            yield trainer
        finally:
            trainer.kill()


async def test_every_reply_is_the_trainers_of_the_version_it_names(tmp_path):
    answers = tmp_path / "answers"
    answers.mkdir()
    command = [sys.executable, "-m", "tests.e2e.fresh_trainer", tmp_path / "repo", answers, EVERY_S, BASE_EVERY_S]
    with training([str(part) for part in command], tmp_path / "trainer.log") as trainer:
        first = trainer.stdout.readline()
        assert first, (tmp_path / "trainer.log").read_text()[-3000:]
        with serve(tmp_path / "repo", tmp_path / "serve.log") as serving:
            load = Load(serving, Oracle(answers), json.loads(first)["window"])
            await load.run(SECONDS)
            trainer.stdin.close()
            said = json.loads(await asyncio.to_thread(trainer.stdout.readline))
            page = await asyncio.to_thread(scrape, f"{serving.http_url}/metrics")
            windows = switches(serving)
            failed = serving.events("version_switch_failed")
    report(load, said, windows)
    assert set(load.outcomes) == {"ok"}, load.outcomes
    assert not failed, failed
    assert load.outcomes["ok"] > 0.9 * RATE * SECONDS
    assert len(load.versions) > 0.6 * SECONDS / EVERY_S
    assert {event["base"] for _, _, event in windows} > {1}, "no base was switched to"
    assert total(page, "kjtserve_requests_total", code="ok") >= load.outcomes["ok"]
    assert total(page, "kjtserve_version_switches_total", result="failed") == 0


def report(load, said, windows):
    asked = np.array(load.asked)
    during = {kind: np.zeros(len(asked), dtype=bool) for kind in ("delta", "base")}
    for begin, end, event in windows:
        kind = "base" if event["base"] == event["version"] else "delta"
        during[kind] |= (asked[:, 1] > begin) & (asked[:, 0] < end + 0.1)
    took_ms = (asked[:, 1] - asked[:, 0]) * 1e3
    deltas = [event for _, _, event in windows if event["base"] != event["version"]]
    bases = [event for _, _, event in windows if event["base"] == event["version"]]
    print(
        f"\n{SECONDS:.0f} s: {dict(load.outcomes)}, {load.rows:,} rows, {load.unknown:,} unknown, "
        f"{len(load.versions)} versions; {len(deltas)} deltas and {len(bases)} bases taken up"
    )
    either = during["delta"] | during["base"]
    parts = {"between switches": ~either, "during switches of delta": during["delta"], "of base": during["base"]}
    for name, chosen in ((name, took_ms[part]) for name, part in {**parts, "during all switches": either}.items()):
        if len(chosen):
            p50, p99 = np.quantile(chosen, [0.5, 0.99])
            print(f"{name}: {len(chosen)} requests, p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    print(f"trainer: {said}, publisher {said['publisher_s'] / said['step_s']:.1%} of step time")
    for kind, events in (("delta", deltas), ("base", bases)):
        if events:
            medians = {
                part: round(float(np.median([event[part] for event in events])), 3)
                for part in ("publish_to_served_s", "load_s", "preflight_s")
            }
            print(f"{kind}: medians {medians}; the rest is until it was noticed")
