"""The group that a team of ranks holds: of its own, and destroyed however the export ends."""

import pytest
import torch.distributed as dist

from export.errors import ExportError
from export.team import Ranks


@pytest.fixture
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fail(*_, **__):
    raise RuntimeError("no such group")


def test_a_team_without_a_process_group_is_refused():
    with pytest.raises(ExportError, match=r"no process group: call torch\.distributed\.init_process_group"):
        Ranks()


@pytest.mark.usefixtures("_one_rank")
def test_a_group_that_cannot_be_destroyed_hides_no_error_and_makes_none(monkeypatch, caplog):
    with monkeypatch.context() as patched:
        patched.setattr(dist, "destroy_process_group", fail)
        with pytest.raises(ExportError, match="table user"), Ranks() as team:
            team.each(lambda: refuse("table user"))
        with Ranks() as team:
            assert team.together(lambda: team.rank) == [0]
    assert "the export's process group could not be destroyed: no such group" in caplog.text


@pytest.mark.usefixtures("_one_rank")
def test_a_group_that_cannot_be_made_is_one_line(monkeypatch):
    monkeypatch.setattr(dist, "new_group", fail)
    with pytest.raises(ExportError, match=r"late \(no such group\); run it again$"):
        Ranks()


def refuse(message):
    raise ExportError(message)
