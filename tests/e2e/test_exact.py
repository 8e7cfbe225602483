"""The trainer's exact answers, bit for bit, through HTTP and gRPC, at every shard count."""

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.e2e.conftest import SHARD_COUNTS

pytestmark = pytest.mark.e2e

NAMES = [f"{kind}{n}" for kind in ("ec", "mc") for n in SHARD_COUNTS] + ["hashed2", "plan3"]
PROTOCOLS = {"http": triton_http, "grpc": triton_grpc}
OUTPUTS = ("embeddings", "row_ids", "hits", "output_lengths")


def infer(client, api, model, keys, values, lengths, *, outputs=OUTPUTS, int32=False, **options):  # noqa: PLR0917
    number = np.int32 if int32 else np.int64
    arrays = [
        ("values", np.asarray(values, dtype=number), "INT32" if int32 else "INT64"),
        ("lengths", np.asarray(lengths, dtype=number), "INT32" if int32 else "INT64"),
    ]
    if keys is not None:
        arrays.append(("keys", np.array([key.encode() for key in keys], dtype=np.object_), "BYTES"))
    inputs = []
    for name, array, datatype in arrays:
        tensor = api.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    result = client.infer(model, inputs, outputs=[api.InferRequestedOutput(name) for name in outputs], **options)
    return {name: result.as_numpy(name) for name in outputs}


def same_bits(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@pytest.fixture(params=sorted(PROTOCOLS))
def wire(request, stack):
    api = PROTOCOLS[request.param]
    address = stack.http if request.param == "http" else stack.grpc
    with api.InferenceServerClient(address) as client:
        yield client, api


@pytest.mark.parametrize("name", NAMES)
def test_answers_equal_the_unsharded_module(name, cases, wire):
    case = cases[1][name]
    client, api = wire
    rng = np.random.default_rng(sum(name.encode()))
    features = list(case.manifest.features)
    for batch_size, most in [(0, 0), (1, 0), (1, 1), (3, 4), (7, 40), (64, 30)]:
        keys = [features[i] for i in rng.permutation(len(features))]
        lengths = rng.integers(0, most + 1, (len(keys), batch_size))
        if batch_size > 1:
            lengths[rng.integers(len(keys))] = 0  # an empty feature
        ids = {key: case.draw(rng, key, int(lengths[i].sum())) for i, key in enumerate(keys)}
        values = [i for key in keys for i in ids[key]]
        answer = infer(client, api, name, keys, values, lengths)
        embeddings, row_ids, hits = case.expected(keys, ids)
        assert same_bits(answer["embeddings"], embeddings)
        assert same_bits(answer["row_ids"], row_ids)
        assert same_bits(answer["hits"], hits)
        blocks = [lengths[i] for i, key in enumerate(keys) for table in case.manifest.tables if key in table.features]
        assert answer["output_lengths"].tolist() == np.concatenate(blocks).tolist()


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("mc")])
def test_evicted_ids_and_sentinels_answer_as_unknown_ids(name, cases, wire):
    case = cases[1][name]
    client, api = wire
    for key in ("user", "item"):
        evicted = case.evicted[key]
        assert evicted
        keys = list(case.manifest.features)
        ids = {each: [] for each in keys} | {key: [*evicted, -1, 2**63 - 1]}
        lengths = [[len(ids[k])] for k in keys]
        answer = infer(client, api, name, keys, [i for k in keys for i in ids[k]], lengths)
        default_row = case.manifest.table(key).rows - 1
        assert not answer["hits"].any()
        assert set(answer["row_ids"].tolist()) == {default_row}


@pytest.mark.parametrize("name", ["ec3", "mc3", "mc5"])
def test_answers_equal_the_modules_own_forward(name, cases, wire):
    """Where the collection's own forward is well defined, it is the oracle, not our reading of it."""
    case = cases[1][name]
    client, api = wire
    rng = np.random.default_rng(7)
    keys = list(case.manifest.features)
    lengths = rng.integers(0, 5, (len(keys), 6))
    draws = {key: [i for i in case.draw(rng, key, 400) if i not in {-1, 2**63 - 1}] for key in keys}
    ids = {key: draws[key][: int(lengths[i].sum())] for i, key in enumerate(keys)}
    values = [i for key in keys for i in ids[key]]
    kjt = KeyedJaggedTensor(
        keys=keys, values=torch.tensor(values), lengths=torch.tensor(lengths.reshape(-1), dtype=torch.int64)
    )
    case.module.eval()
    answer = infer(client, api, name, keys, values, lengths)["embeddings"]
    with torch.no_grad():
        result = case.module(kjt)
    result = result[0] if isinstance(result, tuple) else result
    names = [
        name
        for key in keys
        for table in case.manifest.tables
        for feature, name in zip(table.features, table.embedding_names, strict=True)
        if feature == key
    ]
    assert same_bits(answer, np.concatenate([result[n].values().numpy() for n in names]))


def test_any_order_of_keys_in_any_sequence_of_requests_gives_the_same_rows(cases, wire):
    case = cases[1]["mc3"]
    client, api = wire
    rng = np.random.default_rng(3)
    features = list(case.manifest.features)
    ids = {key: case.draw(rng, key, 9) for key in features}
    for _ in range(6):
        keys = [features[i] for i in rng.permutation(len(features))]
        answer = infer(client, api, "mc3", keys, [i for key in keys for i in ids[key]], [[9]] * len(keys))
        assert same_bits(answer["embeddings"], case.expected(keys, ids)[0])


def test_the_default_keys_are_the_manifests_features(cases, wire):
    case = cases[1]["mc2"]
    client, api = wire
    keys = list(case.manifest.features)
    ids = {key: case.draw(np.random.default_rng(5), key, 3) for key in keys}
    values = [i for key in keys for i in ids[key]]
    answer = infer(client, api, "mc2", None, values, [3] * len(keys))
    assert same_bits(answer["embeddings"], case.expected(keys, ids)[0])


@pytest.mark.parametrize("name", ["ec2", "mc2"])
def test_int32_ids_and_lengths_give_the_same_rows(name, cases, wire):
    case = cases[1][name]
    client, api = wire
    keys = list(case.manifest.features)
    ids = {key: [i % 7 for i in range(5)] for key in keys}
    values = [i for key in keys for i in ids[key]]
    answer = infer(client, api, name, keys, values, [[5]] * len(keys), int32=True)
    assert same_bits(answer["embeddings"], case.expected(keys, ids)[0])


def test_the_unique_form_expands_to_the_rows(cases, wire):
    case = cases[1]["mc5"]
    client, api = wire
    keys = list(case.manifest.features)
    ids = {key: case.draw(np.random.default_rng(11), key, 200) for key in keys}
    values = [i for key in keys for i in ids[key]]
    outputs = ("embeddings", "unique_embeddings", "inverse")
    answer = infer(client, api, "mc5", keys, values, [[200]] * len(keys), outputs=outputs)
    assert same_bits(answer["unique_embeddings"][answer["inverse"]], answer["embeddings"])
    assert len(answer["unique_embeddings"]) < len(values)


def test_fp16_on_request_is_the_rounded_fp32(cases, wire):
    case = cases[1]["ec3"]
    client, api = wire
    keys = list(case.manifest.features)
    ids = {key: [0, 1, 2] for key in keys}
    values = [i for key in keys for i in ids[key]]
    options = {"outputs": ("embeddings",), "parameters": {"output_dtype": "FP16"}}
    answer = infer(client, api, "ec3", keys, values, [[3]] * len(keys), **options)
    assert same_bits(answer["embeddings"], case.expected(keys, ids)[0].astype(np.float16))


def test_ten_thousand_ids_and_more_pass_whole(cases, wire):
    case = cases[1]["mc5"]
    client, api = wire
    keys = list(case.manifest.features)
    ids = {key: case.draw(np.random.default_rng(13), key, 30_000) for key in keys}
    values = [i for key in keys for i in ids[key]]
    answer = infer(client, api, "mc5", keys, values, [[30_000]] * len(keys))
    embeddings, row_ids, hits = case.expected(keys, ids)
    assert same_bits(answer["embeddings"], embeddings)
    assert same_bits(answer["row_ids"], row_ids)
    assert same_bits(answer["hits"], hits)
