"""What is known of the versions that a repository holds."""

import pytest

from export import export_collection
from export.contract import Runtime, versions
from export.contract.layout import MANIFEST_FILE
from export.errors import ExportError
from export.plans import make_plan
from export.published import check_devices, check_runtime, find_version
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


def test_a_shard_lies_on_one_device_for_all_its_versions(repo, tmp_path):
    for devices in ([], ["cpu"], ["cpu", "cuda:0"]):  # a second shard is new
        check_devices(repo, "ids", devices)
    check_devices(repo, "clicks", ["cuda:0"])
    with pytest.raises(ExportError) as raised:
        export_collection(plain_collection(), repo, name="ids", device="cuda:1")
    assert str(raised.value) == (
        "device 'cuda:1' of shard 0: version 2 of 'ids' has it on 'cpu', and Triton runs all versions of a shard alike; "
        "use the same --device, or --name or --out of its own"
    )
    assert versions(repo, "ids") == [1, 2]
    devices = ["cpu", "cuda:1"]
    export_collection(plain_collection(), tmp_path, name="ids", plan=make_plan({"shards": 2, "devices": devices}))
    export_collection(plain_collection(), tmp_path, name="ids", num_shards=1)
    with pytest.raises(ExportError, match="device 'cuda:0' of shard 0"):
        export_collection(plain_collection(), tmp_path, name="ids", num_shards=2, device="cuda:0")
