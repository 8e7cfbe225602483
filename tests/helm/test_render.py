"""What both Helms render of the chart, over values, Kubernetes versions and known APIs."""

import functools
import json
import tarfile
from dataclasses import replace

import kubernetes_validate
import pytest
import yaml

from tests.helm import objects as checks
from tests.helm.charts import CASES, CHART, HELMS, KUBE_VERSIONS, MONITORING, ROOT, Render, run_helm
from tests.helm.objects import MONITORS, of_kind, pod_spec, size_bytes

CHECKS = (
    checks.check_names,
    checks.check_selectors,
    checks.check_ports,
    checks.check_volumes,
    checks.check_resources,
    checks.check_probes,
    checks.check_hardening,
    checks.check_monitors,
)


@functools.cache
def validate(document, kube_version):
    kubernetes_validate.validate(json.loads(document), kube_version, strict=True)


def triton(objects, shard=0):
    return pod_spec(of_kind(objects, "StatefulSet")[shard])["containers"][0]


def front(objects):
    return pod_spec(of_kind(objects, "Deployment")[0])["containers"][0]


def shard_addresses(objects):
    args = front(objects)["args"]
    return args[args.index("--shards") + 1].split(",")


@pytest.mark.parametrize("helm", HELMS)
def test_helm_lints_the_chart_strictly(helm):
    done = run_helm(helm, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 chart(s) linted, 0 chart(s) failed" in done.stdout
    assert "WARNING" not in done.stdout + done.stderr


@pytest.mark.parametrize("kube_version", KUBE_VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_every_object_passes_its_strict_kubernetes_schema(case, kube_version):
    objects = replace(CASES[case], kube_version=kube_version).objects()
    builtin = [item for item in objects if item["kind"] not in MONITORS]
    assert {"StatefulSet", "Deployment", "Service", "ConfigMap"} <= {item["kind"] for item in builtin}
    for item in builtin:
        validate(json.dumps(item), kube_version)


@pytest.mark.parametrize("case", CASES)
def test_objects_fit_together(case):
    objects = CASES[case].objects()
    accounts = [] if of_kind(objects, "ServiceAccount") else ["shared"]
    complaints = [complaint for check in CHECKS for complaint in check(objects)]
    assert complaints + list(checks.check_references(objects, accounts=accounts)) == []


@pytest.mark.parametrize("case", CASES)
def test_both_helms_render_the_same_objects(case):
    first, second = (replace(CASES[case], helm=helm).objects() for helm in HELMS)
    assert sorted(first, key=checks.label) == sorted(second, key=checks.label)


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("kube_version", KUBE_VERSIONS)
def test_monitors_are_there_only_when_wanted_and_known_or_forced(helm, kube_version):
    def kinds(apis, **monitoring):
        render = Render(helm=helm, kube_version=kube_version, apis=apis, values={"monitoring": monitoring})
        return {item["kind"] for item in render.objects()} & set(MONITORS)

    assert kinds([MONITORING]) == set(MONITORS)
    assert kinds([]) == set()
    assert kinds([], force=True) == set(MONITORS)
    assert kinds([MONITORING], enabled=False, force=True) == set()


@pytest.mark.parametrize("helm", HELMS)
def test_the_package_renders_what_the_directory_renders(helm, tmp_path):
    done = run_helm(helm, "package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("kjtserve-*.tgz")
    with tarfile.open(package) as archive:
        names = {name.removeprefix("kjtserve/") for name in archive.getnames()}
    assert {"Chart.yaml", "README.md", "values.yaml", "values.schema.json", "templates/NOTES.txt"} <= names
    assert Render(helm=helm).objects(package) == Render(helm=helm).objects()


@pytest.mark.parametrize("helm", HELMS)
def test_a_cluster_older_than_supported_is_refused(helm):
    done = Render(helm=helm, kube_version="1.24").run()
    assert done.returncode != 0
    assert "1.25" in done.stderr


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_the_shard_count_is_said_once(count):
    objects = Render(values={"shards": {"count": count}}).objects()
    sets = of_kind(objects, "StatefulSet")
    services = {service["metadata"]["name"]: service for service in of_kind(objects, "Service")}
    assert len(sets) == len(shard_addresses(objects)) == len(services) - 1 == count
    for shard, (item, address) in enumerate(zip(sets, shard_addresses(objects), strict=True)):
        name, namespace, rest = address.split(".", 2)
        assert (name, namespace, rest) == (item["metadata"]["name"], "ranking", "svc:8001")
        assert name.endswith(f"-shard-{shard}")
        assert 8001 in {port["port"] for port in services[name]["spec"]["ports"]}


def test_a_shard_loads_its_model_of_each_collection_and_probes_the_same():
    objects = CASES["many_shards"].objects()
    for shard, item in enumerate(of_kind(objects, "StatefulSet")):
        container = triton(objects, shard)
        models = [f"clicks_shard_{shard}", f"views.v2_shard_{shard}"]
        loaded = [arg.partition("=")[2] for arg in container["args"] if arg.startswith("--load-model=")]
        assert loaded == models
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["exec"]["command"][-2:] == models
        assert item["spec"]["podManagementPolicy"] == "Parallel"


def test_shared_memory_comes_on_top_of_the_memory_that_was_asked_for():
    values = {"shards": {"shmSize": "512Mi", "resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "3Gi"}}}}
    objects = Render(values=values).objects()
    shm = next(v for v in pod_spec(of_kind(objects, "StatefulSet")[0])["volumes"] if v["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "512Mi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in triton(objects)["volumeMounts"]
    resources = triton(objects)["resources"]
    assert size_bytes(resources["requests"]["memory"]) == (2048 + 512) << 20
    assert size_bytes(resources["limits"]["memory"]) == (3072 + 512) << 20


@pytest.mark.parametrize(("artifact_gib", "allowed_s"), [(0, 60), (2, 80.48), (200, 2108)])
def test_a_start_may_take_as_long_as_its_artifact_needs(artifact_gib, allowed_s):
    probe = triton(Render(values={"shards": {"startup": {"artifactGiB": artifact_gib}}}).objects())["startupProbe"]
    assert 0 <= probe["failureThreshold"] * probe["periodSeconds"] - allowed_s < probe["periodSeconds"]


@pytest.mark.parametrize(("delay_s", "grace_s"), [(0, 0), (5, 10), (2.5, 30.2)])
def test_kubernetes_waits_longer_than_either_tier_drains(delay_s, grace_s):
    values = {
        "front": {"settings": {"drain_delay_s": delay_s, "drain_grace_s": grace_s}},
        "shards": {"exitTimeoutSeconds": 77},
    }
    objects = Render(values=values).objects()
    assert pod_spec(of_kind(objects, "Deployment")[0])["terminationGracePeriodSeconds"] >= delay_s + grace_s + 5
    assert pod_spec(of_kind(objects, "StatefulSet")[0])["terminationGracePeriodSeconds"] == 87
    assert "--exit-timeout-secs=77" in triton(objects)["args"]


def test_a_shard_that_is_restarted_for_a_dead_process_is_not_waited_for():
    values = {"shards": {"exitTimeoutSeconds": 600}}
    for kube_version in KUBE_VERSIONS:
        objects = Render(kube_version=kube_version, values=values).objects()
        assert triton(objects)["livenessProbe"]["terminationGracePeriodSeconds"] == 5
        assert "terminationGracePeriodSeconds" not in triton(objects)["readinessProbe"]


def test_disruption_budgets_are_there_only_where_they_can_act():
    def budgets(shard_replicas, front_replicas):
        values = {"shards": {"count": 2, "replicas": shard_replicas}, "front": {"replicas": front_replicas}}
        items = of_kind(Render(values=values).objects(), "PodDisruptionBudget")
        return {item["metadata"]["name"]: item["spec"]["maxUnavailable"] for item in items}

    shards = {"prod-kjtserve-shard-0": 1, "prod-kjtserve-shard-1": 1}
    assert budgets(1, 1) == {}
    assert budgets(1, 2) == {"prod-kjtserve-front": 1}
    assert budgets(2, 1) == shards
    assert budgets(3, 2) == {"prod-kjtserve-front": 1} | shards


def test_changed_settings_restart_the_front_tier_and_leave_the_shards_alone():
    before = Render().objects()
    after = Render(values={"front": {"settings": {"max_ids": 1000}}}).objects()
    template = of_kind(before, "Deployment")[0]["spec"]["template"]["metadata"]["annotations"]
    changed = of_kind(after, "Deployment")[0]["spec"]["template"]["metadata"]["annotations"]
    assert template["checksum/settings"] != changed["checksum/settings"]
    assert of_kind(before, "StatefulSet") == of_kind(after, "StatefulSet")


def test_selectors_hold_nothing_that_a_release_of_the_chart_changes():
    for item in of_kind(CASES["defaults"].objects(), "Deployment", "StatefulSet"):
        selector = item["spec"]["selector"]["matchLabels"].keys()
        labels = item["metadata"]["labels"].keys()
        assert {"helm.sh/chart", "app.kubernetes.io/version", "app.kubernetes.io/managed-by"} <= labels - selector


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ({}, "kjtserve:0.1.0"),
        ({"tag": "1.2"}, "kjtserve:1.2"),
        ({"registry": "r.example.com:5000", "repository": "a/b"}, "r.example.com:5000/a/b:0.1.0"),
        ({"tag": "1.2", "digest": "sha256:" + "0" * 64}, "kjtserve@sha256:" + "0" * 64),
    ],
)
def test_the_image_is_named_by_registry_repository_and_digest_or_tag(image, reference):
    objects = Render(values={"image": image}).objects()
    assert {container["image"] for _, container in checks.containers(objects)} == {reference}


def test_the_chart_runs_the_release_that_it_lies_beside():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'\nversion = "{chart["appVersion"]}"\n' in (ROOT / "pyproject.toml").read_text()


def test_the_notes_show_a_lookup(tmp_path):
    # Helm 3's dry run asks a cluster.
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"models": {"source": "emptyDir"}, "collections": ["views"]}))
    done = run_helm("helm-4.3", "install", "prod", str(CHART), "--dry-run=client", "--values", str(values))
    notes = done.stdout.partition("NOTES:")[2]
    assert "/v1/collections/views:lookup" in notes, done.stderr
    assert "port-forward service/prod-kjtserve-front 8080:8080" in notes
    assert "models.source is emptyDir" in notes
