"""A person's word on which version is served, in the repository."""

import pytest

from export import export_collection, export_delta
from export.contract import RepositoryError, UserError, read_pin
from service.versions.rollback import follow_newest, roll_back
from tests.modules import plain_collection


@pytest.fixture
def repo(tmp_path):
    module = plain_collection({"t": 4})
    export_collection(module, tmp_path, name="c")
    for _ in range(2):
        export_delta(module, tmp_path, name="c")
    return tmp_path


def test_without_a_version_it_goes_back_by_one_and_again(repo):
    assert "c is pinned to version 2; newer versions wait until" in roll_back(repo, None, None)
    assert read_pin(repo, "c") == 2
    roll_back(repo, "c", None)
    assert read_pin(repo, "c") == 1
    with pytest.raises(UserError, match=r"c has no version before 1; published are \[1, 2, 3\]"):
        roll_back(repo, "c", None)


def test_a_version_can_be_named_and_the_pin_taken_back(repo):
    roll_back(repo, "c", 1)
    assert read_pin(repo, "c") == 1
    assert follow_newest(repo, "c") == f"{repo}: c follows the newest version, which is 3"
    assert read_pin(repo, "c") is None


def test_what_is_not_there_is_named(repo):
    with pytest.raises(RepositoryError, match=r"published versions: \[1, 2, 3\]"):
        roll_back(repo, "c", 9)
    with pytest.raises(RepositoryError, match="there is no 'd'"):
        roll_back(repo, "d", None)
    export_collection(plain_collection({"t": 4}), repo, name="d")
    with pytest.raises(RepositoryError, match="say which one with --name"):
        roll_back(repo, None, None)


def test_a_repository_that_cannot_be_written_says_so(repo, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "pin.json")

    monkeypatch.setattr("service.versions.rollback.write_pin", refuse)
    with pytest.raises(UserError, match="Permission denied; the pin is written where the repository is written"):
        roll_back(repo, "c", 1)


@pytest.mark.parametrize("content", ["", "{", "3", '{"version": 0}', '{"version": "2"}', '{"version": 1, "by": "me"}'])
def test_a_pin_that_is_none_is_named_with_what_it_has_to_be(repo, content):
    (repo / "c" / "pin.json").write_text(content)
    with pytest.raises(RepositoryError, match=r'pin\.json: not a pin, which is \{"version": 3\}'):
        read_pin(repo, "c")
