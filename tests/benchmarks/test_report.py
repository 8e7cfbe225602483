import io
import json

import pytest
from rich.console import Console

from benchmarks.report import Comparison, Measurement, as_document, render


def comparison(target, contender=(2.0, 3.0, 1.0, 9.0, 2.0), unit="ns/id"):
    return Comparison(
        workload="remap",
        setting="20 M ids",
        baseline="TorchRec",
        contender="hash lookup",
        unit=unit,
        baseline_rounds=(10.0, 30.0, 10.0, 30.0, 8.0),
        contender_rounds=contender,
        target=target,
    )


def test_ratio_is_the_median_of_the_rounds_own_ratios():
    assert comparison(None).ratio == pytest.approx(0.2)


@pytest.mark.parametrize(("target", "met"), [(0.21, True), (0.19, False), (None, None)])
def test_target_is_an_upper_bound(target, met):
    assert comparison(target).met is met


def measurement(target):
    return Measurement(
        workload="start", setting="4 M rows", subject="first answer", unit="s", rounds=(9.0, 2.0, 3.0), target=target
    )


@pytest.mark.parametrize(("target", "met"), [(3.0, True), (2.9, False), (None, None)])
def test_a_figure_of_its_own_is_judged_by_its_median(target, met):
    assert measurement(target).value == 3.0
    assert measurement(target).met is met


def lines_of(*results, width=80):
    page = io.StringIO()
    comparisons = [row for row in results if isinstance(row, Comparison)]
    measurements = [row for row in results if isinstance(row, Measurement)]
    Console(file=page, width=width).print(render(comparisons, measurements, caption="fixed seed"))
    return page.getvalue().splitlines()


@pytest.mark.parametrize(("target", "words"), [(0.21, "≤ 0.21 met"), (0.19, "≤ 0.19 MISSED"), (None, "")])
def test_table_shows_medians_ratio_and_verdict_on_one_line(target, words):
    lines = lines_of(comparison(target))
    (line,) = [line for line in lines if "ns/id" in line]
    for part in ("10.0", "2.0", "0.200", words):
        assert part in line
    assert ("≤" in line) == bool(words)
    assert any("fixed seed" in line for line in lines)


def test_units_of_one_comparison_share_a_row_and_keep_a_line_each():
    wall = comparison(0.21, unit="ns/id wall")
    cpu = comparison(None, contender=(5.0,) * 5, unit="ns/id CPU")
    first, second = (line for line in lines_of(wall, cpu) if "ns/id" in line)
    assert ("0.200" in first, "0.500" in second) == (True, True)
    assert sum("remap" in line for line in lines_of(wall, cpu)) == 1


@pytest.mark.parametrize(("target", "words"), [(6.0, "≤ 6 met"), (2.5, "≤ 2.5 MISSED")])
def test_table_shows_a_figure_of_its_own_with_its_verdict(target, words):
    (line,) = [line for line in lines_of(measurement(target), width=120) if "start: 4 M rows" in line]
    assert "3.0" in line
    assert words in line


def test_document_holds_every_round_and_survives_json():
    document = as_document([comparison(0.2)], [measurement(6.0)], notes=["how"])
    assert json.loads(json.dumps(document)) == document | {
        "comparisons": [
            row | {"baseline_rounds": list(row["baseline_rounds"]), "contender_rounds": list(row["contender_rounds"])}
            for row in document["comparisons"]
        ],
        "measurements": [row | {"rounds": list(row["rounds"])} for row in document["measurements"]],
    }
    (figure,) = document["measurements"]
    assert (figure["value"], figure["met"]) == (3.0, True)
    (row,) = document["comparisons"]
    assert (row["baseline_median"], row["contender_median"], row["met"]) == (10.0, 2.0, True)
    assert document["machine"]["packages"]["torch"]
