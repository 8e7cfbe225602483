"""A shard's process is killed; a server is killed: what clients, readiness and the shards themselves do."""

import asyncio
import time

import numpy as np
import psutil
import pytest
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from export.contract import hash_shard
from tests.e2e.asking import infer
from tests.e2e.conftest import Case
from tests.e2e.serving import until
from tests.modules import map_of

pytestmark = pytest.mark.e2e


def ids_on(case: Case, shard: int) -> list[int]:
    ids = np.array(list(map_of(case.module, "user")), dtype=np.int64)
    return ids[hash_shard(ids.view(np.uint64), 2) == shard].tolist()


def ask(serving, ids, **options):
    with triton_http.InferenceServerClient(serving.http, network_timeout=30) as client:
        started = time.monotonic()
        try:
            return infer(
                client, triton_http, "clicks", ["user", "item"], ids, [[len(ids)], [0]], **options
            ), time.monotonic() - started
        except InferenceServerException as exc:
            return exc, time.monotonic() - started


def is_ready(serving):
    return serving.get("/v2/health/ready")[0] == 200


@pytest.mark.parametrize("victim", ["shard process", "triton"])
def test_what_was_killed_comes_back_by_itself_and_meanwhile_the_answer_is_declared(victim, clicks):
    serving, case = clicks
    until(lambda: is_ready(serving), 60, "ready before the kill")
    near, far = ids_on(case, 0), ids_on(case, 1)
    if victim == "shard process":
        serving.shard_process("clicks_shard_1").kill()
    else:
        next(child for child in serving.children() if child.name() == "tritonserver").kill()

    failure, took_s = ask(serving, far, parameters={"timeout_ms": 4000})
    assert isinstance(failure, InferenceServerException), "the shard is dead and yet it answered"
    assert failure.status() == "503"
    assert "clicks_shard_1" in failure.message()
    assert took_s < 4.5

    until(lambda: names_the_shard(serving, "clicks_shard_1"), 10, "readiness goes false and names the shard")
    assert serving.get("/v2/health/live")[0] == 200
    if victim == "shard process":
        answer, _ = ask(serving, near)
        embeddings, *_ = case.expected(["user", "item"], {"user": near, "item": []})
        assert answer["embeddings"].tobytes() == embeddings.tobytes(), "the other shard's answers must not suffer"
        filled, _ = ask(
            serving, near[:1] + far[:1], outputs=("embeddings", "missing"), parameters={"on_shard_failure": "zero"}
        )
        if filled["missing"].any():  # else it was repaired in between
            assert filled["missing"].tolist() == [False, True]
            assert not filled["embeddings"][1].any()

    until(lambda: is_ready(serving), 60, "ready again")
    answer, _ = ask(serving, near + far)
    embeddings, row_ids, hits = case.expected(["user", "item"], {"user": near + far, "item": []})
    assert answer["embeddings"].tobytes() == embeddings.tobytes()
    assert np.array_equal(answer["row_ids"], row_ids)
    assert np.array_equal(answer["hits"], hits)


def names_the_shard(serving, model):
    code, body = serving.get("/v2/health/ready")
    return code == 503 and model in body


def test_a_stopped_shard_process_fails_only_those_who_need_it_within_their_deadline(clicks):
    serving, case = clicks
    until(lambda: is_ready(serving), 60, "ready before the stop")
    process = serving.shard_process("clicks_shard_1")
    process.suspend()
    try:
        failure, took_s = ask(serving, ids_on(case, 1), parameters={"timeout_ms": 500})
        assert failure.status() in {"503", "504"}
        assert took_s < 1.5
        near = ids_on(case, 0)
        answer, took_s = ask(serving, near)
        assert (
            answer["embeddings"].tobytes() == case.expected(["user", "item"], {"user": near, "item": []})[0].tobytes()
        )
        assert took_s < 1.0
    finally:
        process.resume()
    until(lambda: is_ready(serving), 60, "ready again")


async def test_liveness_answers_while_large_requests_are_under_way(clicks):
    serving, case = clicks
    until(lambda: is_ready(serving), 60, "ready")
    ids = (ids_on(case, 0) + ids_on(case, 1)) * 2000
    load = [asyncio.create_task(asyncio.to_thread(ask, serving, ids)) for _ in range(6)]
    slowest = 0.0
    while not all(task.done() for task in load):
        started = time.monotonic()
        code, _ = await asyncio.to_thread(serving.get, "/v2/health/live")
        assert code == 200
        slowest = max(slowest, time.monotonic() - started)
    answers = [answer for answer, _ in await asyncio.gather(*load)]
    expected = case.expected(["user", "item"], {"user": ids, "item": []})[0].tobytes()
    assert all(answer["embeddings"].tobytes() == expected for answer in answers)
    assert slowest < 2.0, f"the event loop was held up for {slowest:.3f} s"


def test_file_descriptors_and_memory_do_not_grow_with_calls(clicks):
    serving, case = clicks
    until(lambda: is_ready(serving), 60, "ready")
    process = psutil.Process(serving.process.pid)
    ids = ids_on(case, 0)[:3] + ids_on(case, 1)[:3]
    with triton_http.InferenceServerClient(serving.http) as client:
        for _ in range(200):
            infer(client, triton_http, "clicks", ["user", "item"], ids, [[len(ids)], [0]])
        descriptors, memory = process.num_fds(), process.memory_info().rss
        for _ in range(1500):
            infer(client, triton_http, "clicks", ["user", "item"], ids, [[len(ids)], [0]])
        assert process.num_fds() <= descriptors + 2
        assert process.memory_info().rss <= memory + (8 << 20)
