"""The shard runtime in a real Triton; ids and rows are those of conftest's TinyShard."""

import asyncio
import re
import time
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc
from tritonclient.utils import InferenceServerException

from service.triton import TritonServer
from service.triton_control import TritonCallError, load_model, read_index, unload_model
from service.triton_versions import pin_versions, read_config

pytestmark = pytest.mark.e2e

MODEL = "clicks_shard_0"
DEADLINE_S = 20.0
SAMPLE = re.compile(r"^(kjtserve_\w+)\{(.*)\} (\S+)$", re.MULTILINE)


@pytest.fixture
async def triton(link):
    server = TritonServer(link.parent.parent, [MODEL])
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


async def ask(triton, ids, table_lengths, *, version=1, model_version=1, outputs=("embeddings", "row_ids", "hits")):
    """Arrays by output name."""
    inputs = []
    for name, values in (("ids", ids), ("table_lengths", table_lengths), ("version", [version])):
        array = np.array(values, dtype=np.int64)
        inputs.append(triton_grpc.InferInput(name, list(array.shape), "INT64"))
        inputs[-1].set_data_from_numpy(array)
    wanted = [triton_grpc.InferRequestedOutput(name) for name in outputs]
    async with triton_grpc.InferenceServerClient(triton.grpc_address) as client:
        result = await client.infer(
            MODEL, inputs, model_version=str(model_version), outputs=wanted, client_timeout=DEADLINE_S
        )
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


@pytest.fixture
def load(triton, link):
    """Load exactly some versions, as a deployment does that holds them."""
    config = read_config(link.parent.parent, MODEL)

    async def run(*versions: int) -> None:
        await load_model(triton.grpc_address, MODEL, pin_versions(config, versions))

    return run


async def read_samples(triton) -> dict[tuple[str, str, str], float]:
    """(name, table, outcome) → value of the shard's own metrics."""
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(triton.metrics_url, timeout=5).read().decode())
    samples = {}
    for name, labels, value in SAMPLE.findall(text):
        label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert (label["collection"], label["shard"]) == ("clicks", "0")
        samples[name, label["table"], label.get("outcome", "")] = float(value)
    return samples


async def expect_counts(triton, expected: dict[tuple[str, str], float]) -> None:
    """Wait until the counters, which lag by milliseconds, hold exactly ``expected``."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        samples = await read_samples(triton)
        counts = {(table, outcome): value for (name, table, outcome), value in samples.items() if outcome}
        if {key: value for key, value in counts.items() if value or key in expected} == expected:
            return
        assert time.monotonic() < deadline, counts
        await asyncio.sleep(0.02)


async def test_a_shard_answers_over_the_wire_and_counts_exactly(triton):
    zero = {("user", "hit"): 0, ("user", "unknown"): 0, ("item", "hit"): 0, ("item", "out_of_range"): 0}
    await expect_counts(triton, zero)
    samples = await read_samples(triton)
    assert samples["kjtserve_zch_open_slots", "user", ""] == 14
    assert samples["kjtserve_zch_rows", "user", ""] == 5

    answer = await ask(triton, [104, 7, 100, 2, -1, 100], [3, 3])
    np.testing.assert_array_equal(answer["embeddings"], [[4 * r + d for d in range(4)] for r in (4, 5, 0, 8, 9, 9)])
    assert answer["row_ids"].tolist() == [14, 19, 10, 2, -1, -1]
    assert answer["hits"].tolist() == [True, False, True, True, False, False]
    assert (await ask(triton, [], [0, 0]))["embeddings"].shape == (0, 4)
    assert list(await ask(triton, [103], [1, 0], outputs=["hits"])) == ["hits"]
    await expect_counts(
        triton, {("user", "hit"): 3, ("user", "unknown"): 1, ("item", "hit"): 1, ("item", "out_of_range"): 2}
    )

    await asyncio.gather(*(ask(triton, list(range(100, 110)) * 50, [500, 0]) for _ in range(64)))
    await expect_counts(
        triton, {("user", "hit"): 16003, ("user", "unknown"): 16001, ("item", "hit"): 1, ("item", "out_of_range"): 2}
    )


async def test_mistakes_get_their_code_and_the_next_request_an_answer(triton):
    for call, code, words in (
        (ask(triton, [1], [1, 0], version=9), "NOT_FOUND", "version: 9, this process serves 1"),
        (ask(triton, [1], [1, 0], model_version=9), "NOT_FOUND", "'clicks_shard_0' version 9 is not"),
        (ask(triton, [1], [2, 0]), "INVALID_ARGUMENT", "table_lengths: sum to 2, ids has 1"),
        (ask(triton, [1], [2, -1]), "INVALID_ARGUMENT", "table_lengths: -1 is negative"),
        (ask(triton, [1], [1]), "INVALID_ARGUMENT", "table_lengths: 1 entries"),
    ):
        with pytest.raises(InferenceServerException) as failure:
            await call
        assert (failure.value.status(), words in failure.value.message()) == (f"StatusCode.{code}", True), failure.value
    assert (await ask(triton, [101], [1, 0]))["row_ids"].tolist() == [11]


async def test_counters_keep_their_values_over_reloads_and_versions_answer_side_by_side(triton, add_version, load):
    await ask(triton, [100, 0], [1, 1])
    add_version(2)
    await load(1, 2)
    for version in (1, 2):
        await ask(triton, [100], [1, 0], version=version, model_version=version)
    await unload_model(triton.grpc_address, MODEL)
    deadline = time.monotonic() + DEADLINE_S
    while any(state.ready for state in await read_index(triton.grpc_address)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    await load(1, 2)
    await ask(triton, [100], [1, 0], version=2, model_version=2)
    await expect_counts(
        triton, {("user", "hit"): 4, ("user", "unknown"): 0, ("item", "hit"): 1, ("item", "out_of_range"): 0}
    )


async def test_a_truncated_new_version_is_refused_by_name_and_the_old_one_serves_on(triton, add_version, load):
    state = add_version(2) / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-8])
    with pytest.raises(TritonCallError, match=r"state\.safetensors: \d+ bytes, the manifest says \d+"):
        await load(1, 2)
    assert (await ask(triton, [101], [1, 0]))["row_ids"].tolist() == [11]
