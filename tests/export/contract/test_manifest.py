"""The manifest: what one writer writes, strict readers read; what breaks a rule is refused by name."""

import json
import re

import pytest
from pydantic import ValidationError

from export.contract import (
    Manifest,
    RepositoryError,
    Routing,
    StateFile,
    check_collection_name,
    check_size,
    collections,
    read_manifest,
    versions,
)
from tests.manifests import make_manifest, make_table


def example():
    tables = [
        make_table("user", ["user", "both"], routing=Routing.HASH, num_shards=2, shared=["both"], input_hash="h.pt2"),
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
        (("schema_version",), 1, "schema_version"),
        (("version",), 0, "version"),
        (("version",), "1", "version\n.*valid integer"),
        (("version",), 1.0, "version\n.*valid integer"),
        (("created_s",), "now", "created_s"),
        (("shards", 0, "state_bytes"), True, "state_bytes\n.*valid integer"),
        (("tables", 0, "routing"), "HASH", "routing\n.*'hash'"),
        (("collection",), "../clicks", "collection name '../clicks'"),
        (("files", 0, "path"), "/etc/passwd", "path '/etc/passwd': must be relative"),
        (("files", 0, "path"), "other.pt2", "table user: its input_hash 'h.pt2' is not among the files"),
        (("tables", 0, "input_hash"), "../../evil.pt2", "path '../../evil.pt2': must be relative"),
        (("tables", 0, "input_hash"), "evil.pt2", "table user: its input_hash 'evil.pt2' is not among the files"),
        (
            ("tables", 0, "embedding_names"),
            ["both@item", "x"],
            "user and item: both have the embedding name 'both@item'",
        ),
        (("shards", 1, "model"), "clicks_shard_0", "shard 1: its model is clicks_shard_1, not 'clicks_shard_0'"),
        (("shards", 0, "tables", 0, "table"), "who", "does not list it once"),
        (("num_shards",), 3, "shards must be 0..2"),
        (("dim",), 5, "dim 3, the collection has 5"),
        (("tables", 0, "name"), "item", "named once"),
        (("tables", 0, "zch"), None, "zch"),
        (("tables", 2, "routing"), "hash", "not for remap none; use table, rows, columns, replicated"),
        (("tables", 0, "routing"), "rows", "not for remap mch; use hash, table, training"),
        (("tables", 2, "placements", 1, "row_start"), 5, "on no shard, or on two"),
        (("tables", 2, "placements", 1, "row_stop"), 6, "end at row 6"),
        (("tables", 2, "placements", 1, "shard"), 0, "names a shard at most once"),
        (("tables", 2, "placements", 1, "col_start"), 1, "only routing 'columns' cuts rows"),
        (("tables", 0, "training"), None, "remap mch and training do not go together"),
        (("tables", 0, "training", "row_edges"), [0, 7], "buckets end at row 7"),
        (("tables", 0, "training", "row_edges"), [0, 9, 7], "they start with 0 and never fall"),
        (("shards", 0, "width"), 2, "the shard's 2 divides it"),
        (("shards", 0, "tables", 0, "width"), 1, "its pieces have 3"),
        (("shards", 0, "device"), "gpu", "device"),
        (("tables", 0, "embedding_names"), ["user"], "one embedding name for each feature"),
        (("shards", 1, "tables"), [], "does not list it once"),
        (("shards", 1, "index"), 0, "in order"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_name(path, value, words):
    document = json.loads(example().model_dump_json())
    set_at(document, path, value)
    with pytest.raises(ValidationError, match=words):
        Manifest.model_validate_json(json.dumps(document))


@pytest.mark.parametrize("path", ["", "/", "a/../b", "..", "./a", "a//b", "a/", "/a", "a\\b", "a\nb", "a\0"])
def test_a_path_that_may_leave_the_version_is_refused(path):
    with pytest.raises(ValidationError, match="must be relative to the version directory"):
        StateFile(path=path, size_bytes=0, sha256="0" * 64)


@pytest.mark.parametrize("path", ["h.pt2", "shard_0/state.safetensors", "a..b/...", "shard_0/__pycache__"])
def test_a_path_inside_the_version_passes(path):
    assert StateFile(path=path, size_bytes=0, sha256="0" * 64).path == path


def test_a_file_listed_twice_is_refused():
    document = json.loads(example().model_dump_json())
    document["files"] *= 2
    with pytest.raises(ValidationError, match="listed once each"):
        Manifest.model_validate_json(json.dumps(document))


def test_a_shard_that_lists_a_table_placed_elsewhere_is_refused():
    tables = [make_table(name, [name], routing=Routing.TABLE, num_shards=2, home=at) for at, name in enumerate("ab")]
    document = json.loads(make_manifest(tables, 2).model_dump_json())
    document["shards"][0]["tables"].append({"table": "b", "rows": 1, "width": 3})
    with pytest.raises(ValidationError, match="shard 0: lists table 'b', which is not placed there"):
        Manifest.model_validate_json(json.dumps(document))


def test_the_size_of_a_file_is_held_against_the_manifest(tmp_path):
    manifest = example()
    with pytest.raises(RepositoryError, match=r"h\.pt2: No such file or directory; the manifest lists it"):
        check_size(tmp_path, manifest, "h.pt2")
    (tmp_path / "h.pt2").write_bytes(b"12")
    with pytest.raises(RepositoryError, match=r"h\.pt2: 2 bytes, the manifest says 1: the copy is incomplete"):
        check_size(tmp_path, manifest, "h.pt2")
    (tmp_path / "h.pt2").write_bytes(b"1")
    assert check_size(tmp_path, manifest, "h.pt2") == tmp_path / "h.pt2"
    with pytest.raises(RepositoryError, match=r"manifest\.json: lists no file other\.pt2"):
        check_size(tmp_path, manifest, "other.pt2")


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
    with pytest.raises(RepositoryError, match=r"version: Field required; base: .*; created_s: .*; and 6 more$"):
        read_manifest(tmp_path, "clicks", 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "manifest: Invalid JSON: EOF"),
        (b"\xff\xfe", "manifest: Invalid JSON"),
        (b"[]", "manifest: Input should be an object"),
        (b'{"a\\nb": 1}', "base: Field required; and 8 more"),
        (example().model_dump_json().replace('"num_shards":2', '"num_shards":3').encode(), "manifest: shards must be"),
    ],
)
def test_a_broken_manifest_is_one_short_line(tmp_path, content, words):
    publish(tmp_path, "clicks", 1)
    (tmp_path / "clicks/1/manifest.json").write_bytes(content)
    with pytest.raises(RepositoryError, match=re.escape(words)) as caught:
        read_manifest(tmp_path, "clicks", 1)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/clicks/1/manifest.json: not a manifest this kjtserve can read: ")
    assert "\n" not in message
    assert "http" not in message
    assert "Value error" not in message


@pytest.mark.parametrize("name", ["", "9a", "a/b", "..", "a b", "x" * 64, "a_shard_0", "clicks\n"])
def test_a_name_that_cannot_be_a_collection_is_refused_with_the_rule(name):
    with pytest.raises(ValueError, match="collection name"):
        check_collection_name(name)


@pytest.mark.parametrize("name", ["a", "clicks-v2.eu_west", "a_shard_", "shard_0"])
def test_ordinary_names_pass(name):
    assert check_collection_name(name) == name
