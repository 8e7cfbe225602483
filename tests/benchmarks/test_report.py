import io
import json

import pytest
from rich.console import Console

from benchmarks.report import Comparison, as_document, render


def comparison(target, contender=(2.0, 3.0, 1.0, 9.0, 2.0)):
    return Comparison(
        workload="remap",
        setting="20 M ids",
        baseline="TorchRec",
        contender="hash lookup",
        unit="ns/id",
        baseline_rounds=(10.0, 30.0, 10.0, 30.0, 8.0),
        contender_rounds=contender,
        target=target,
    )


def test_ratio_is_the_median_of_the_rounds_own_ratios():
    assert comparison(None).ratio == pytest.approx(0.2)


@pytest.mark.parametrize(("target", "met"), [(0.21, True), (0.19, False), (None, None)])
def test_target_is_an_upper_bound(target, met):
    assert comparison(target).met is met


@pytest.mark.parametrize(("target", "words"), [(0.21, "≤ 0.21 met"), (0.19, "≤ 0.19 MISSED")])
def test_table_shows_medians_ratio_and_verdict(target, words):
    page = io.StringIO()
    Console(file=page, width=200).print(render([comparison(target)], caption="fixed seed"))
    text = page.getvalue()
    for part in ("10.0 ns/id", "2.0 ns/id", "0.200", *words, "fixed seed"):
        assert part in text


def test_document_holds_every_round_and_survives_json():
    document = as_document([comparison(0.2)], notes=["how"])
    assert json.loads(json.dumps(document)) == document | {
        "comparisons": [
            row | {"baseline_rounds": list(row["baseline_rounds"]), "contender_rounds": list(row["contender_rounds"])}
            for row in document["comparisons"]
        ]
    }
    (row,) = document["comparisons"]
    assert (row["baseline_median"], row["contender_median"], row["met"]) == (10.0, 2.0, True)
    assert document["machine"]["packages"]["torch"]
