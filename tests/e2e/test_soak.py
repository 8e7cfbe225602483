"""Load over both protocols while shard processes are killed: every answer is exact or a declared failure.

``make soak`` runs it for minutes, CI for ``KJTSERVE_SOAK_S`` seconds.
"""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.utils import InferenceServerException

from tests.e2e.serving import until
from tests.e2e.test_metrics import scrape, total

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

SECONDS = float(os.environ.get("KJTSERVE_SOAK_S", "300"))
CALM_S = 4.0
DECLARED = {"503", "504", "StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED"}


class Load:
    """Clients that ask until told to stop, and hold every answer against the oracle."""

    def __init__(self, serving, case):
        self.serving, self.case = serving, case
        self.keys = list(case.manifest.features)
        self.outcomes: Counter[str] = Counter()
        self.stop = asyncio.Event()
        self.kills = 0

    def draw(self, rng):
        ids = {key: self.case.draw(rng, key, int(rng.integers(0, 40))) for key in self.keys}
        return ids, [i for key in self.keys for i in ids[key]], [[len(ids[key])] for key in self.keys]

    def judge(self, ids, answer):
        embeddings, row_ids, hits = self.case.expected(self.keys, ids)
        assert answer["embeddings"].tobytes() == embeddings.tobytes()
        assert answer["row_ids"].tobytes() == row_ids.tobytes()
        assert answer["hits"].tobytes() == hits.tobytes()

    async def ask(self, seed, lookup):
        rng = np.random.default_rng(seed)
        while not self.stop.is_set():
            ids, values, lengths = self.draw(rng)
            try:
                answer = await lookup(values, lengths)
            except InferenceServerException as exc:
                if exc.status() not in DECLARED:
                    raise
                self.outcomes[exc.status()] += 1
                await asyncio.sleep(0.05)
            else:
                self.judge(ids, answer)
                self.outcomes["ok"] += 1

    async def over_http(self, seed):
        async with triton_http_aio.InferenceServerClient(self.serving.http) as client:
            await self.ask(seed, lambda values, lengths: self.infer(client, triton_http, values, lengths))

    async def over_grpc(self, seed):
        async with triton_grpc_aio.InferenceServerClient(self.serving.grpc) as client:
            await self.ask(seed, lambda values, lengths: self.infer(client, triton_grpc, values, lengths))

    async def infer(self, client, api, values, lengths):
        tensors = []
        for name, data in (("values", values), ("lengths", lengths)):
            array = np.asarray(data, dtype=np.int64)
            tensors.append(api.InferInput(name, list(array.shape), "INT64"))
            tensors[-1].set_data_from_numpy(array)
        names = ("embeddings", "row_ids", "hits")
        result = await client.infer("clicks", tensors, outputs=[api.InferRequestedOutput(name) for name in names])
        return {name: result.as_numpy(name) for name in names}

    async def kill(self, rng):
        """Kill a shard's process, wait until another one serves, and again."""
        while not await self.stopped_within(CALM_S):
            model = f"clicks_shard_{rng.integers(2)}"
            victim = self.serving.shard_process(model)
            victim.kill()
            self.kills += 1
            await asyncio.to_thread(until, lambda: self.is_back(model, victim.pid), 120, f"another process of {model}")  # noqa: B023

    async def stopped_within(self, seconds):
        try:
            await asyncio.wait_for(self.stop.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def is_back(self, model, old_pid):
        try:
            replaced = self.serving.shard_process(model).pid != old_pid
        except AssertionError:  # not there yet
            return False
        return replaced and self.serving.get("/v2/health/ready")[0] == 200


async def test_under_kills_every_answer_is_exact_or_a_declared_failure(clicks):
    serving, case = clicks
    until(lambda: serving.get("/v2/health/ready")[0] == 200, 60, "ready")
    before = scrape(f"{serving.http_url}/metrics")
    load = Load(serving, case)
    async with asyncio.TaskGroup() as group:
        for seed in range(4):
            group.create_task(load.over_http(seed))
            group.create_task(load.over_grpc(100 + seed))
        group.create_task(load.kill(np.random.default_rng(1)))
        await asyncio.sleep(SECONDS)
        load.stop.set()
    print(f"\n{SECONDS:.0f} s: {dict(load.outcomes)}, {load.kills} kills")
    assert load.kills
    assert load.outcomes["ok"] > 10 * SECONDS
    await asyncio.to_thread(until, lambda: serving.get("/v2/health/ready")[0] == 200, 60, "ready after the storm")
    after = scrape(f"{serving.http_url}/metrics")
    counted = {
        code: sum(
            total(samples, "kjtserve_requests_total", route=route, code=code) * sign
            for samples, sign in ((after, 1), (before, -1))
            for route in ("rest_infer", "grpc_infer")
        )
        for code in ("ok", "unavailable", "deadline_exceeded", "internal")
    }
    failures = sum(count for outcome, count in load.outcomes.items() if outcome != "ok")
    assert counted["internal"] == 0
    assert counted["unavailable"] + counted["deadline_exceeded"] == failures
    assert counted["ok"] == load.outcomes["ok"]
    assert total(after, "kjtserve_inflight_requests") == 0
    with await asyncio.to_thread(urlopen, f"{serving.http_url}/v2/health/live", timeout=5) as response:
        assert response.status == 200


CLIENTS = 64
IDS_EACH = 500_000
FLOOD = Path(__file__).with_name("flood.py")


async def test_liveness_answers_while_many_clients_send_half_a_million_ids_each(clicks):
    serving, _ = clicks
    until(lambda: serving.get("/v2/health/ready")[0] == 200, 60, "ready")
    flood = await asyncio.create_subprocess_exec(
        sys.executable,
        FLOOD,
        *serving.http.split(":"),
        *(str(number) for number in (CLIENTS, IDS_EACH, min(SECONDS, 20))),
        stdout=asyncio.subprocess.PIPE,
    )
    ended = asyncio.create_task(flood.communicate())
    waits_s = []
    while not ended.done():
        started = time.monotonic()
        code, _ = await asyncio.to_thread(serving.get, "/v2/health/live", 30)
        assert code == 200
        waits_s.append(time.monotonic() - started)
        await asyncio.sleep(0.02)
    answers = json.loads((await ended)[0])
    p99_s = float(np.quantile(waits_s, 0.99))
    rss = psutil.Process(serving.process.pid).memory_info().rss
    print(f"\n{answers}; liveness p99 {p99_s * 1e3:.0f} ms, max {max(waits_s) * 1e3:.0f} ms; {rss >> 20} MB")
    assert set(answers) <= {"200", "429", "504"}
    assert answers["200"] > 10
    assert len(waits_s) > 20
    assert np.median(waits_s) < 0.2
    assert rss < 4 << 30, "bytes in flight are bounded, and memory with them"
