"""The manifest: what one writer writes, strict readers read; what breaks a rule is refused by name."""

import json

import pytest
from pydantic import ValidationError

from export.contract import (
    Manifest,
    RepositoryError,
    Routing,
    check_collection_name,
    collections,
    read_manifest,
    versions,
)
from tests.manifests import make_manifest, make_table


def example():
    tables = [
        make_table("user", ["user", "both"], routing=Routing.HASH, num_shards=2, shared=["both"]),
        make_table("item", ["both", "item"], routing=Routing.HASH, num_shards=2, shared=["both"]),
        make_table("cat", ["cat"], routing=Routing.ROWS, num_shards=2, rows=7),
    ]
    return make_manifest(tables, 2)


def test_it_survives_the_round_trip_as_json():
    manifest = example()
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest


def test_features_and_embedding_names_are_in_torchrecs_order():
    manifest = example()
    assert manifest.features == ("user", "both", "item", "cat")
    assert [name for _, _, name in manifest.embeddings] == ["user", "both@user", "both@item", "item", "cat"]


def set_at(document, path, value):
    *way, last = path
    for step in way:
        document = document[step]
    document[last] = value


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("surprise",), 1, "surprise"),
        (("tables", 0, "surprise"), 1, "surprise"),
        (("schema_version",), 2, "schema_version"),
        (("version",), 0, "version"),
        (("num_shards",), 3, "shards must be 0..2"),
        (("dim",), 5, "dim 3, the collection has 5"),
        (("tables", 0, "name"), "item", "named once"),
        (("tables", 0, "zch"), None, "zch"),
        (("tables", 2, "routing"), "hash", "managed-collision"),
        (("tables", 0, "routing"), "rows", "raw ids"),
        (("tables", 2, "placements", 1, "row_start"), 5, "on no shard, or on two"),
        (("tables", 2, "placements", 1, "row_stop"), 6, "end at row 6"),
        (("tables", 2, "placements", 1, "shard"), 0, "every shard once"),
        (("tables", 0, "embedding_names"), ["user"], "one embedding name for each feature"),
        (("shards", 1, "tables"), [], "does not list it once"),
        (("shards", 1, "index"), 0, "in order"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_name(path, value, words):
    document = json.loads(example().model_dump_json())
    set_at(document, path, value)
    with pytest.raises(ValidationError, match=words):
        Manifest.model_validate(document)


def publish(repo, name, version, manifest=None):
    folder = repo / name / str(version)
    folder.mkdir(parents=True)
    document = manifest or example().model_copy(update={"collection": name, "version": version})
    (folder / "manifest.json").write_text(document.model_dump_json())


def test_versions_are_directories_with_a_manifest_in_numeric_order(tmp_path):
    for version in (10, 2, 1):
        publish(tmp_path, "clicks", version)
    for stranger in (".staging-3-17", "3", "007", "latest"):
        (tmp_path / "clicks" / stranger).mkdir()
    (tmp_path / "clicks/007/manifest.json").write_text("{}")
    (tmp_path / "clicks_shard_0").mkdir()
    assert versions(tmp_path, "clicks") == [1, 2, 10]
    assert list(collections(tmp_path)) == ["clicks"]
    assert versions(tmp_path, "nobody") == []


def test_a_manifest_in_the_wrong_place_is_refused(tmp_path):
    publish(tmp_path, "clicks", 2, example())
    with pytest.raises(RepositoryError, match="says clicks version 1, its place says clicks 2"):
        read_manifest(tmp_path, "clicks", 2)


def test_a_version_that_is_not_there_names_those_that_are(tmp_path):
    publish(tmp_path, "clicks", 2)
    with pytest.raises(RepositoryError, match=r"published versions: \[2\]"):
        read_manifest(tmp_path, "clicks", 5)


def test_a_manifest_that_is_none_says_what_ails_it(tmp_path):
    publish(tmp_path, "clicks", 1)
    (tmp_path / "clicks/1/manifest.json").write_text('{"collection": "clicks"}')
    with pytest.raises(RepositoryError, match="num_shards"):
        read_manifest(tmp_path, "clicks", 1)


@pytest.mark.parametrize("name", ["", "9a", "a/b", "..", "a b", "x" * 64, "a_shard_0", "clicks\n"])
def test_a_name_that_cannot_be_a_collection_is_refused_with_the_rule(name):
    with pytest.raises(ValueError, match="collection name"):
        check_collection_name(name)


@pytest.mark.parametrize("name", ["a", "clicks-v2.eu_west", "a_shard_", "shard_0"])
def test_ordinary_names_pass(name):
    assert check_collection_name(name) == name
