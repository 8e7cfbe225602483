import shutil

import pytest

from benchmarks import ranks
from benchmarks.exporter import Figures
from export.contract import UserError


def figures(peak_mb, written_mb):
    return Figures(seconds=2.0, peak_rss_bytes=peak_mb * 10**6, written_bytes=written_mb * 10**6)


def test_each_exporter_may_hold_the_table_and_a_fifth_of_it_and_write_each_row_once():
    taken = [figures(4915, 2048), figures(4916, 2048)]
    measured = {each.subject: each for each in ranks._report(ranks.ROWS, taken)}
    assert measured["peak RSS of rank 0"].met is True
    assert measured["peak RSS of rank 1"].met is False
    assert measured["peak RSS of rank 0 by the rows it writes"].value == pytest.approx(2.4, abs=0.001)
    assert measured["bytes written"].value == 4096
    assert measured["bytes written"].met is True
    twice = {each.subject: each for each in ranks._report(ranks.ROWS, [figures(1, 4096), figures(1, 4096)])}
    assert twice["bytes written"].met is False


def test_a_small_table_has_no_bounds():
    assert {each.target for each in ranks._report(ranks.QUICK_ROWS, [figures(900, 60), figures(900, 60)])} == {None}


def test_too_little_room_is_said_before_anything_is_written(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 5, 5))
    with pytest.raises(UserError, match=r"has 0\.0 GB free, the export needs 8\.6; set TMPDIR"):
        ranks.run(ranks.ROWS)


@pytest.mark.e2e
def test_a_rank_that_fails_says_why():
    with pytest.raises(UserError, match=r"^bench: save by 2 ranks failed: \w+Error: "):
        ranks.run(0)


@pytest.mark.e2e
def test_two_ranks_save_and_two_export(monkeypatch):
    monkeypatch.setattr(ranks, "DIM", 8)
    told = []
    taken = {each.subject: each for each in ranks.run(3001, on_progress=lambda *step: told.append(step))}
    assert 0.1 < taken["time, every answer checked"].value < 60
    assert 3001 * 8 * 4 < taken["bytes written"].value * 1e6 < 2_000_000
    assert 200 < taken["peak RSS of rank 1"].value < 1000
    assert [done for _, done, _ in told] == [0, 1, 0, 1]
