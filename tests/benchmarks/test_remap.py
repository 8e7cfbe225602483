import json

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from benchmarks import cli, ranks, remap, start
from benchmarks.report import Measurement
from export.contract import UserError

NUM_IDS = 3000


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with torch.inference_mode():
        return remap.build_workbench(NUM_IDS, tmp_path_factory.mktemp("bench"))


@pytest.fixture
def short_calls(monkeypatch):
    monkeypatch.setattr(remap, "IDS_PER_CALL", 500)
    monkeypatch.setattr(remap, "CALLS_PER_ROUND", 2)


def test_all_sides_agree_on_known_and_unknown_ids(bench):
    ids = torch.cat([bench.ids, bench.ids + 1])
    with torch.inference_mode():
        rows, _ = bench.mch_remap(ids)
        assert sorted(rows[:NUM_IDS].tolist()) == list(range(NUM_IDS))
        assert set(rows[NUM_IDS:].tolist()) == {NUM_IDS}
        embeddings = bench.mch_remap_gather(ids)[1]
        assert torch.equal(bench.hash_remap(ids)[0], rows)
        assert torch.equal(bench.shard_program(ids)[0], rows)
        assert torch.equal(bench.shard_program(ids)[1], embeddings)


def test_calls_hold_the_stated_mix_and_differ_between_rounds(bench):
    one, other = remap.draw_calls(bench.ids, 1), remap.draw_calls(bench.ids, 2)
    assert len(one) == remap.CALLS_PER_ROUND
    assert {call.shape for call in one} == {(remap.IDS_PER_CALL,)}
    known = torch.isin(torch.cat(one), bench.ids).float().mean().item()
    assert known == pytest.approx(remap.KNOWN_SHARE, abs=0.01)
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[0], remap.draw_calls(bench.ids, 1)[0])


@pytest.mark.usefixtures("short_calls")
def test_run_measures_every_round_by_both_clocks_and_puts_the_threads_back(monkeypatch):
    monkeypatch.setattr(remap, "TARGET_MAP_SIZE", NUM_IDS)
    before, steps = torch.get_num_threads(), []
    comparisons = remap.run(NUM_IDS, rounds=5, on_progress=lambda *told: steps.append(told))
    assert torch.get_num_threads() == before
    total = remap.num_steps(5)
    assert steps == [("remap, 0.003 M ids", done, total) for done in range(total + 1)]
    assert len(comparisons) == 4 * len(remap.thread_counts())
    assert all(len(row.baseline_rounds) == len(row.contender_rounds) == 5 for row in comparisons)
    assert all(min(row.baseline_rounds + row.contender_rounds) > 0 for row in comparisons)


@pytest.mark.usefixtures("short_calls")
def test_cost_per_id_is_judged_on_one_thread_by_both_clocks(monkeypatch):
    monkeypatch.setattr(remap, "TARGET_MAP_SIZE", NUM_IDS)
    monkeypatch.setattr(remap, "thread_counts", lambda: (1, 2))
    targets = {
        (row.setting[-9:].strip(" ,"), row.unit): row.target
        for row in remap.run(NUM_IDS, rounds=5)
        if row.workload == "remap"
    }
    assert targets == {
        ("1 thread", "ns/id wall"): 0.2,
        ("1 thread", "ns/id CPU"): 0.2,
        ("2 threads", "ns/id wall"): None,
        ("2 threads", "ns/id CPU"): None,
    }


def a_start(rows, *, on_progress):
    on_progress("starting the shard", 1, 1)
    return [
        Measurement(workload="start", setting=f"{rows} rows", subject="first answer", unit="s", rounds=(1.0,), target=6)
    ]


@pytest.mark.usefixtures("short_calls")
def test_command_prints_a_table_and_writes_every_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "QUICK_MAP_SIZES", (NUM_IDS,))
    monkeypatch.setattr(start, "run", a_start)
    monkeypatch.setattr(ranks, "run", a_start)
    app = Typer()
    app.command()(cli.bench)
    path = tmp_path / "deep" / "bench.json"
    result = CliRunner().invoke(app, ["--quick", "--rounds", "5", "--json", str(path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "hash lookup" in result.stdout
    assert f"start: {start.QUICK_ROWS} rows" in result.stdout
    document = json.loads(path.read_text())
    assert len(document["comparisons"]) == 4 * len(remap.thread_counts())
    assert len(document["measurements"]) == 2


def test_a_json_path_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(remap, "run", lambda *_, **__: pytest.fail("measured first"))
    with pytest.raises(UserError, match=f"--json {tmp_path}: Is a directory"):
        cli.bench(quick=True, json_path=tmp_path)


def test_a_full_disk_is_one_clear_line(monkeypatch):
    def run(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(remap, "run", run)
    with pytest.raises(UserError, match="No space left on device; set TMPDIR"):
        cli.bench(quick=True)


def test_fewer_than_five_rounds_are_refused():
    app = Typer()
    app.command()(cli.bench)
    assert CliRunner().invoke(app, ["--quick", "--rounds", "4"]).exit_code == 2
