"""Values, schema and templates cover each other, and the schema refuses what is wrong."""

import json
import os
import re
from itertools import pairwise

import pytest
import yaml

from service.settings import Settings
from tests.helm.charts import CHART, HELMS, MONITORING, Render
from tests.helm.objects import of_kind

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
SET_BY_THE_CHART = {"host", "http_port", "grpc_port"}

WRONG = [
    # values, the path that the message has to name
    ({"sharding": {}}, "sharding"),
    ({"shards": {"number": 2}}, "number"),
    ({"image": {"name": "x"}}, "name"),
    ({"front": {"settings": {"max_idz": 1}}}, "max_idz"),
    ({"front": {"settings": {"http_port": 1}}}, "http_port"),
    ({"front": {"service": {"port": 80}}}, "port"),
    ({"shards": {"startup": {"artifactBytes": 1}}}, "artifactBytes"),
    ({"shards": {"resources": {"limits": {"gpu": 1}}}}, "gpu"),
    ({"front": {"tolerations": [{"keys": "x"}]}}, "keys"),
    ({"shards": {"count": 0}}, "shards.count"),
    ({"shards": {"count": -1}}, "shards.count"),
    ({"shards": {"count": 1.5}}, "shards.count"),
    ({"shards": {"count": "2"}}, "shards.count"),
    ({"shards": {"replicas": "2"}}, "shards.replicas"),
    ({"front": {"replicas": 0}}, "front.replicas"),
    ({"front": {"service": {"httpPort": 99999}}}, "front.service.httpPort"),
    ({"front": {"service": {"grpcPort": 0}}}, "front.service.grpcPort"),
    ({"front": {"service": {"type": "ExternalName"}}}, "front.service.type"),
    ({"front": {"settings": {"max_ids": 0}}}, "front.settings.max_ids"),
    ({"front": {"settings": {"default_timeout_s": 0}}}, "front.settings.default_timeout_s"),
    ({"front": {"settings": {"log_level": "loud"}}}, "front.settings.log_level"),
    ({"front": {"settings": {"log_json": "false"}}}, "front.settings.log_json"),
    ({"front": {"settings": {"drain_grace_s": None}}}, "drain_grace_s"),
    ({"image": {"tag": "latest"}}, "image.tag"),
    ({"image": {"tag": 1.2}}, "image.tag"),
    ({"image": {"digest": "sha256:abc"}}, "image.digest"),
    ({"image": {"pullPolicy": "Sometimes"}}, "image.pullPolicy"),
    ({"podSecurityContext": {"runAsUser": 0}}, "podSecurityContext.runAsUser"),
    ({"models": {"source": "hostPath"}}, "models.source"),
    ({"models": {"claimName": "My_Claim"}}, "models.claimName"),
    ({"models": {"claimName": ""}}, "models.claimName"),
    ({"models": {"mountPath": "models"}}, "models.mountPath"),
    ({"models": {"mountPath": "/tmp"}}, "models.mountPath"),
    ({"collections": []}, "collections"),
    ({"collections": ["a", "a"]}, "collections"),
    ({"collections": ["clicks_shard_0"]}, "collections.0"),
    ({"collections": "clicks"}, "collections"),
    ({"shards": {"shmSize": "128Mb"}}, "shards.shmSize"),
    ({"shards": {"shmSize": "1.5Gi"}}, "shards.shmSize"),
    ({"shards": {"resources": {"limits": {"memory": None}}}}, "memory"),
    ({"shards": {"resources": {"requests": {"cpu": "two"}}}}, "shards.resources.requests.cpu"),
    ({"shards": {"liveness": {"timeoutSeconds": 1}}}, "shards.liveness.timeoutSeconds"),
    ({"shards": {"extraArgs": ["log-verbose"]}}, "shards.extraArgs.0"),
    ({"monitoring": {"interval": "soon"}}, "monitoring.interval"),
    ({"monitoring": {"labels": {"a": 1}}}, "monitoring.labels.a"),
]

# Another valid value of each leaf of values.yaml, by path; the rest is found by type in `other_value`.
OTHER = {
    "image.registry": "r.example.com",
    "image.repository": "other",
    "image.tag": "9.9",
    "image.digest": "sha256:" + "1" * 64,
    "image.pullPolicy": "Always",
    "imagePullSecrets": ["secret"],
    "models.source": "emptyDir",
    "models.mountPath": "/srv/other",
    "collections": ["views"],
    "shards.extraArgs": ["--log-verbose=1"],
    "shards.tolerations": [{"operator": "Exists"}],
    "front.tolerations": [{"operator": "Exists"}],
    "front.service.type": "NodePort",
    "monitoring.interval": "3m",
}


def resolve(schema):
    name = schema.get("$ref", "").removeprefix("#/definitions/")
    return SCHEMA["definitions"][name] if name else schema


def schema_leaves(schema, path=""):
    schema = resolve(schema)
    if not schema.get("properties"):
        yield path
        return
    for key, child in schema["properties"].items():
        yield from schema_leaves(child, f"{path}.{key}".lstrip("."))


def value_leaves(values, path=""):
    if not isinstance(values, dict) or not values:
        yield path
        return
    for key, child in values.items():
        yield from value_leaves(child, f"{path}.{key}".lstrip("."))


def at(values, path):
    for key in path.split("."):
        values = values[key]
    return values


def with_value(path, value):
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def other_value(path):
    if path in OTHER:
        return OTHER[path]
    value = at(DEFAULTS, path)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 7
    if isinstance(value, dict):
        return {"example.com/key": "value"}
    return "3Gi" if value.endswith("Gi") else "7" if value.isdecimal() else "other"


def object_schemas(schema, path=""):
    schema = resolve(schema)
    if schema.get("type") == "object":
        yield path, schema
    for key, child in schema.get("properties", {}).items():
        yield from object_schemas(child, f"{path}.{key}".lstrip("."))
    if "items" in schema:
        yield from object_schemas(schema["items"], f"{path}[]")


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize(("values", "named"), WRONG, ids=[f"{named}={json.dumps(values)}" for values, named in WRONG])
def test_the_schema_refuses_a_wrong_value_and_names_its_key(helm, values, named):
    done = Render(helm=helm, values=values).run()
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr
    # Helm 3 writes shards.count, Helm 4 /shards/count.
    assert named in done.stderr or named.replace(".", "/") in done.stderr


def test_no_level_of_the_schema_takes_unknown_keys():
    free = {path for path, schema in object_schemas(SCHEMA) if schema.get("additionalProperties") is not False}
    maps = {
        path for path in free if path.rpartition(".")[2] in {"annotations", "podAnnotations", "nodeSelector", "labels"}
    }
    assert free - maps == {"global"}


def test_values_and_schema_hold_the_same_keys():
    optional = {path for path in schema_leaves(SCHEMA) if path.startswith("front.settings.") or path == "global"}
    optional |= {"shards.resources.limits.cpu", "front.resources.limits.cpu"}
    values, schema = set(value_leaves(DEFAULTS)), set(schema_leaves(SCHEMA))
    assert values - schema == set()
    assert schema - values - optional == set()


def test_every_default_is_documented_in_place():
    lines = (CHART / "values.yaml").read_text().splitlines()
    defaults = [(above, line) for above, line in pairwise(lines) if re.fullmatch(r" *[A-Za-z_]+: .+", line)]
    assert len(defaults) > 60
    assert [line for above, line in defaults if not above.lstrip().startswith("# ")] == []


@pytest.mark.parametrize("path", sorted(value_leaves(DEFAULTS)))
def test_every_value_changes_what_is_rendered(path):
    apis = [] if path == "monitoring.force" else [MONITORING]
    changed = with_value(path, other_value(path))
    assert at(DEFAULTS, path) != other_value(path)
    assert Render(values=changed, apis=apis).objects() != Render(apis=apis).objects()


def test_the_schema_knows_the_settings_of_the_front_tier_by_name_and_range():
    known = SCHEMA["properties"]["front"]["properties"]["settings"]["properties"]
    assert known.keys() == Settings.model_fields.keys() - SET_BY_THE_CHART, "name the setting in values.schema.json"
    declared = Settings.model_json_schema()["properties"]
    rules = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    for name, schema in known.items():
        if name != "log_level":
            assert {rule: schema.get(rule) for rule in rules} == {rule: declared[name].get(rule) for rule in rules}, (
                name
            )


@pytest.mark.parametrize("helm", HELMS)
def test_the_front_tier_reads_back_the_settings_that_were_given(helm, monkeypatch):
    given = {
        "max_request_bytes": 134217728,
        "max_inflight_bytes": 2**40,
        "default_timeout_s": 2.5,
        "max_batch_wait_us": 0,
        "log_json": False,
        "log_level": "debug",
        "drain_delay_s": 0,
        "drain_grace_s": 30,
    }
    (config,) = of_kind(Render(helm=helm, values={"front": {"settings": given}}).objects(), "ConfigMap")
    for name in [name for name in os.environ if name.startswith("KJTSERVE_")]:
        monkeypatch.delenv(name)
    for name, value in config["data"].items():
        monkeypatch.setenv(name, value)
    assert Settings() == Settings(host="0.0.0.0", **given)
