"""Which versions a load asks Triton for, and how."""

import json

import pytest

from export.contract import RepositoryError
from service.triton_versions import choose_versions, pin_versions, read_config

CONFIG = """
name: "one" backend: "python" max_batch_size: 0
input { name: "x" data_type: TYPE_INT64 dims: [-1] }
instance_group { kind: KIND_CPU count: 1 }
version_policy { latest { num_versions: 2 } }
parameters { key: "a" value { string_value: "b" } }
"""


@pytest.fixture
def repo(tmp_path):
    for version in ("2", "10", "3", ".staging"):
        (tmp_path / "one" / version).mkdir(parents=True)
    (tmp_path / "one" / "config.pbtxt").write_text(CONFIG)
    return tmp_path


def test_a_pinned_configuration_is_the_models_own_but_for_its_version_policy(repo):
    config = read_config(repo, "one")
    before = config.SerializeToString(deterministic=True)
    pinned = json.loads(pin_versions(config, [10, 2]))
    assert pinned.pop("version_policy") == {"specific": {"versions": ["2", "10"]}}
    assert pinned == {
        "name": "one",
        "backend": "python",
        "input": [{"name": "x", "data_type": "TYPE_INT64", "dims": ["-1"]}],
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "parameters": {"a": {"string_value": "b"}},
    }
    assert config.SerializeToString(deterministic=True) == before


def test_mere_names_mean_the_newest_version_by_number(repo):
    assert choose_versions(repo, ["one"]) == {"one": (10,)}
    assert choose_versions(repo, {"one": [3, 2]}) == {"one": (2, 3)}


def test_a_model_without_version_or_configuration_is_named(repo):
    (repo / "empty").mkdir()
    for name in ("empty", "nope"):
        with pytest.raises(RepositoryError, match=f"holds no version of a Triton model '{name}'"):
            choose_versions(repo, [name])
        with pytest.raises(RepositoryError, match=f"holds no Triton model '{name}'"):
            read_config(repo, name)
    (repo / "one" / "config.pbtxt").write_text("name: [")
    with pytest.raises(RepositoryError, match=r"config\.pbtxt: is not a Triton model configuration"):
        read_config(repo, "one")
