"""The seam to Triton, on a stand-in for pb_utils; ids and rows are those of conftest's TinyShard."""

import importlib
import time

import numpy as np
import pytest
import torch

from model_repo.shard import Answer

HIT = {"collection": "clicks", "shard": "0", "table": "user", "outcome": "hit"}
UNKNOWN = HIT | {"outcome": "unknown"}
OVERLAY = HIT | {"outcome": "overlay"}
EVICTED = HIT | {"outcome": "evicted"}
ITEM_HIT = HIT | {"table": "item"}
ITEM_OUT = ITEM_HIT | {"outcome": "out_of_range"}
ITEM_OVERLAY = ITEM_HIT | {"outcome": "overlay"}
USER = {"collection": "clicks", "shard": "0", "table": "user"}


def rows(*numbers):
    """Rows of the tiny shard by local number: row r is 4r, 4r+1, 4r+2, 4r+3."""
    return np.array([[4 * r + d for d in range(4)] for r in numbers], dtype=np.float32).reshape(len(numbers), 4)


@pytest.fixture
def args(link):
    return {"model_repository": str(link.parent), "model_version": "1", "model_name": "clicks_shard_0"}


@pytest.fixture
def model(pb_utils, args):
    model = importlib.import_module("model_repo.runtime").TritonPythonModel()
    model.initialize(args)
    yield model
    model.finalize()


def counters(page):
    return {key: value for key, value in page.values.items() if key[0] == "kjtserve_remap_ids_total"}


def test_known_and_unknown_ids_get_their_rows_table_by_table(model, make_request):
    [response] = model.execute([make_request([104, 7, 100, 2, -1, 100], [3, 3])])
    outputs = response.outputs()
    np.testing.assert_array_equal(outputs["embeddings"], rows(4, 5, 0, 8, 9, 9))
    assert outputs["row_ids"].tolist() == [14, 19, 10, 2, -1, -1]
    assert outputs["hits"].tolist() == [True, False, True, True, False, False]
    assert [outputs[name].dtype for name in ("embeddings", "row_ids", "hits")] == [np.float32, np.int64, np.bool_]


def test_a_request_without_ids_gets_empty_outputs_of_full_rank(model, make_request):
    [response] = model.execute([make_request([], [0, 0])])
    shapes = {name: array.shape for name, array in response.outputs().items()}
    assert shapes == {"embeddings": (0, 4), "row_ids": (0,), "hits": (0,)}


def test_only_the_outputs_asked_for_are_made(model, make_request):
    [response] = model.execute([make_request([100], [1, 0], outputs=("row_ids",))])
    assert list(response.outputs()) == ["row_ids"]


def test_a_bad_request_leaves_its_neighbours_alone(model, make_request):
    good = make_request([101], [1, 0])
    first, bad, last = model.execute([good, make_request([101], [2, 0]), good])
    assert bad.error.code == "INVALID_ARG"
    for response in (first, last):
        np.testing.assert_array_equal(response.outputs()["embeddings"], rows(1))


@pytest.mark.parametrize(
    ("inputs", "code", "words"),
    [
        (
            {"version": (2,)},
            "NOT_FOUND",
            "version: 2, this process serves 1 and deltas on it; there is none of that number",
        ),
        ({"version": (1, 1)}, "INVALID_ARG", "version: 2 numbers"),
        ({"version": ()}, "INVALID_ARG", "version: 0 numbers"),
        ({"version": None}, "INVALID_ARG", "version: the input is missing"),
        ({"ids": None}, "INVALID_ARG", "ids: the input is missing"),
        ({"table_lengths": None}, "INVALID_ARG", "table_lengths: the input is missing"),
        ({"table_lengths": (0,)}, "INVALID_ARG", "1 entries, this shard holds 2 tables: ['user', 'item']"),
        ({"table_lengths": (0, 0, 0)}, "INVALID_ARG", "3 entries"),
        ({"table_lengths": (1, -1)}, "INVALID_ARG", "table_lengths: -1 is negative"),
        ({"table_lengths": (1, 0)}, "INVALID_ARG", "sum to 1, ids has 0"),
        ({"ids": np.zeros(0, np.int32)}, "INVALID_ARG", "ids: torch.int32"),
        ({"ids": np.zeros((1, 0), np.int64)}, "INVALID_ARG", "shape [1, 0]"),
    ],
)
def test_a_mistake_is_named_with_its_code(model, make_request, inputs, code, words):
    [response] = model.execute([make_request(**inputs)])
    assert response.error.code == code
    assert words in str(response.error)


def test_a_cancelled_request_is_not_looked_up(model, make_request, pb_utils):
    cancelled = make_request(np.zeros(5000, np.int64), [5000, 0], cancelled=True)
    gone, answered = model.execute([cancelled, make_request([100], [1, 0])])
    assert gone.error.code == "CANCELLED"
    assert answered.outputs()["hits"].tolist() == [True]
    model.finalize()
    assert sum(counters(pb_utils.page).values()) == 1


def test_a_failure_of_ours_answers_internal_and_is_logged(model, make_request, pb_utils):
    class Broken:
        def requested_output_names(self):
            raise RuntimeError("secret of the machine")

        inputs = make_request().inputs

        def request_id(self):
            return ""

    broken, answered = model.execute([Broken(), make_request([100], [1, 0])])
    assert broken.error.code == "INTERNAL"
    assert "secret" not in str(broken.error)
    assert "secret of the machine" in pb_utils.Logger.lines[0]
    assert answered.error is None


def test_every_series_exists_at_its_start_value_and_warm_up_counts_nothing(model, pb_utils):
    page = pb_utils.page
    assert counters(page) == {
        ("kjtserve_remap_ids_total", tuple(sorted(labels.items()))): 0
        for labels in (HIT, UNKNOWN, OVERLAY, EVICTED, ITEM_HIT, ITEM_OUT, ITEM_OVERLAY)
    }
    assert page["kjtserve_zch_open_slots", USER] == 14
    assert page["kjtserve_zch_rows", USER] == 5
    assert len(page.values) == 9, "a plain table has no zch gauges"


def test_counters_hold_what_follows_from_the_requests(model, make_request, pb_utils):
    model.execute([make_request([104, 7, 100, 2, -1, 100], [3, 3]), make_request([1, 2], [0, 2])])
    model.execute([make_request([103], [0, 0]), make_request([100, 100], [2, 0])])
    model.finalize()
    page = pb_utils.page
    measured = {name: page["kjtserve_remap_ids_total", labels] for name, labels in SERIES.items()}
    assert measured == {"hit": 4, "unknown": 1, "item hit": 3, "item out": 2}


def test_ids_of_a_column_wise_table_are_counted_where_its_first_column_lies(link, edit_manifest, pb_utils, args):
    pieces = [
        {"shard": shard, "row_start": 0, "row_stop": 3, "col_start": 2 * at, "col_stop": 2 * at + 2}
        for at, shard in enumerate((1, 0))
    ]

    def cut(manifest):
        manifest["tables"][1].update(routing="columns", placements=pieces)
        first = manifest["shards"][0]
        first["width"] = first["tables"][1]["width"] = 2
        other = {"index": 1, "model": "clicks_shard_1", "tables": [first["tables"][1]], "width": 2}
        manifest["shards"].append({**first, **other})
        manifest["num_shards"] = 2

    edit_manifest(cut)
    model = importlib.import_module("model_repo.runtime").TritonPythonModel()
    model.initialize(args)
    hits = torch.tensor([True, False, True])
    answer = Answer(embeddings_ND=torch.zeros(3, 2), row_ids_N=torch.zeros(3), hits_N=hits, overlaid_N=~hits)
    model._metrics.count(model._shard.base, answer, [1, 2])
    model.finalize()
    assert pb_utils.page["kjtserve_remap_ids_total", HIT] == 1
    assert not [labels for _, labels in counters(pb_utils.page) if ("table", "item") in labels]


SERIES = {"hit": HIT, "unknown": UNKNOWN, "item hit": ITEM_HIT, "item out": ITEM_OUT}


def test_counts_are_handed_over_soon_and_by_another_thread(model, make_request, pb_utils):
    model.execute([make_request([100], [1, 0])])
    deadline = time.monotonic() + 5
    while pb_utils.page["kjtserve_remap_ids_total", HIT] < 1:
        assert time.monotonic() < deadline, "the counts never arrived"
        time.sleep(0.001)
    assert pb_utils.page.threads == {"kjtserve-metrics"}


def test_a_broken_metrics_page_does_not_stop_answers_or_counting(model, make_request, pb_utils):
    page = pb_utils.page
    page.broken = True
    assert model.execute([make_request([100], [1, 0])])[0].error is None
    deadline = time.monotonic() + 5
    while not pb_utils.Logger.lines:
        assert time.monotonic() < deadline, "the failure was never logged"
        time.sleep(0.001)
    page.broken = False
    model.execute([make_request([100, 101], [2, 0])])
    model.finalize()
    assert page["kjtserve_remap_ids_total", HIT] == 2


def test_a_version_in_use_states_its_gauges_again(model, make_request, pb_utils, monkeypatch):
    monkeypatch.setattr("model_repo.metrics.GAUGE_INTERVAL_S", 0.0)
    page = pb_utils.page
    key = ("kjtserve_zch_rows", tuple(sorted(USER.items())))
    page.values[key] = 77
    model.execute([make_request([100], [1, 0])])
    model.finalize()
    assert page.values[key] == 5


def test_a_version_that_cannot_be_served_is_refused_with_the_reason(pb_utils, args, link):
    (link / "state.safetensors").write_bytes(b"half")
    model = importlib.import_module("model_repo.runtime").TritonPythonModel()
    with pytest.raises(pb_utils.TritonModelException, match=r"state\.safetensors: 4 bytes, the manifest says \d+"):
        model.initialize(args)


def test_threads_come_from_the_environment(pb_utils, args, monkeypatch):
    monkeypatch.setenv("KJTSERVE_SHARD_THREADS", "many")
    model = importlib.import_module("model_repo.runtime").TritonPythonModel()
    with pytest.raises(pb_utils.TritonModelException, match="KJTSERVE_SHARD_THREADS is 'many'"):
        model.initialize(args)
