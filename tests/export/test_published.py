"""What is known of the versions that a repository holds."""

import pytest

from export import export_collection
from export.contract import Runtime
from export.contract.layout import MANIFEST_FILE
from export.errors import ExportError
from export.published import check_runtime, find_version
from tests.modules import plain_collection


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    path = tmp_path_factory.mktemp("repo")
    for version in (1, 2):
        export_collection(plain_collection(), path, name="ids", version=version)
    return path


def test_the_newest_version_is_found_unless_another_is_asked_for(repo):
    assert find_version(repo, "ids", None).version == 2
    assert find_version(repo, "ids", 1).version == 1


@pytest.mark.parametrize(
    ("collection", "version", "message"),
    [
        ("clicks", None, "holds no version of a collection 'clicks'"),
        ("ids", 3, rf"ids/3/{MANIFEST_FILE}: No such file or directory; published versions: \[1, 2\]"),
        ("ids", "1", "version '1': use a whole number"),
    ],
)
def test_a_version_that_is_not_there_is_refused(repo, collection, version, message):
    with pytest.raises(ExportError, match=message):
        find_version(repo, collection, version)


def test_a_collection_has_one_runtime_for_all_its_versions(repo):
    check_runtime(repo, "ids", Runtime.PYTHON)
    check_runtime(repo, "clicks", Runtime.PYTORCH)
    with pytest.raises(ExportError, match="runtime 'pytorch': version 2 of 'ids' is for 'python'"):
        check_runtime(repo, "ids", Runtime.PYTORCH)
