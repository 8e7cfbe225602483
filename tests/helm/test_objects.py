"""Each check of tests/helm/objects.py complains of the fault that it is there for."""

import copy

import pytest

from tests.helm import objects as checks
from tests.helm.charts import CASES
from tests.helm.objects import of_kind, pod_spec


@pytest.fixture
def rendered():
    return copy.deepcopy(CASES["many_shards"].objects())


def shard(objects):
    return of_kind(objects, "StatefulSet")[0]


def container(objects):
    return pod_spec(shard(objects))["containers"][0]


def service(objects):
    return next(s for s in of_kind(objects, "Service") if s["metadata"]["name"].endswith("front"))


def remove_kind(kind):
    def break_it(objects):
        objects[:] = [item for item in objects if item["kind"] != kind]

    return break_it


FAULTS = {
    "name too long": (checks.check_names, lambda o: shard(o)["metadata"].update(name="a" * 53)),
    "service starts with a digit": (checks.check_names, lambda o: service(o)["metadata"].update(name="1a")),
    "label is a number": (checks.check_names, lambda o: shard(o)["metadata"]["labels"].update(a=1)),
    "namespace is a number": (checks.check_names, lambda o: shard(o)["metadata"].update(namespace=7)),
    "one name twice": (checks.check_names, lambda o: o.append(o[0])),
    "selector takes no pod": (checks.check_selectors, lambda o: service(o)["spec"]["selector"].update(a="b")),
    "workload takes others' pods": (
        checks.check_selectors,
        lambda o: shard(o)["spec"]["selector"]["matchLabels"].pop("kjtserve/shard"),
    ),
    "budget for one pod": (checks.check_selectors, lambda o: shard(o)["spec"].update(replicas=1)),
    "port too large": (checks.check_ports, lambda o: service(o)["spec"]["ports"][0].update(port=99999)),
    "container port too large": (checks.check_ports, lambda o: container(o)["ports"][0].update(containerPort=70000)),
    "container port twice": (checks.check_ports, lambda o: container(o)["ports"][0].update(containerPort=8001)),
    "target port unknown": (checks.check_ports, lambda o: service(o)["spec"]["ports"][0].update(targetPort="web")),
    "service port twice": (checks.check_ports, lambda o: service(o)["spec"]["ports"][0].update(port=9000)),
    "mount without volume": (checks.check_volumes, lambda o: pod_spec(shard(o))["volumes"].pop()),
    "volume without mount": (checks.check_volumes, lambda o: container(o)["volumeMounts"].pop()),
    "two mounts at one path": (
        checks.check_volumes,
        lambda o: container(o)["volumeMounts"][0].update(mountPath="/tmp"),
    ),
    "quantity in Mb": (checks.check_resources, lambda o: container(o)["resources"]["requests"].update(memory="128Mb")),
    "quantity is a number": (checks.check_resources, lambda o: container(o)["resources"]["requests"].update(cpu=1)),
    "size limit in Mb": (
        checks.check_resources,
        lambda o: pod_spec(shard(o))["volumes"][1]["emptyDir"].update(sizeLimit="1Mb"),
    ),
    "limit below /dev/shm": (
        checks.check_resources,
        lambda o: container(o)["resources"]["limits"].update(memory="1024Mi"),
    ),
    "no memory limit": (checks.check_resources, lambda o: container(o)["resources"]["limits"].pop("memory")),
    "two handlers": (checks.check_probes, lambda o: container(o)["livenessProbe"].update(tcpSocket={"port": "http"})),
    "no probe": (checks.check_probes, lambda o: container(o).pop("startupProbe")),
    "liveness is readiness": (
        checks.check_probes,
        lambda o: container(o).update(livenessProbe=container(o)["readinessProbe"]),
    ),
    "no config map": (checks.check_references, remove_kind("ConfigMap")),
    "no account": (checks.check_references, remove_kind("ServiceAccount")),
    "no governing service": (checks.check_references, remove_kind("Service")),
    "writable root": (
        checks.check_hardening,
        lambda o: container(o)["securityContext"].update(readOnlyRootFilesystem=False),
    ),
    "root": (checks.check_hardening, lambda o: pod_spec(shard(o))["securityContext"].update(runAsUser=0)),
    "token": (checks.check_hardening, lambda o: pod_spec(shard(o)).pop("automountServiceAccountToken")),
    "latest": (checks.check_hardening, lambda o: container(o).update(image="kjtserve:latest")),
    "no tag": (checks.check_hardening, lambda o: container(o).update(image="kjtserve")),
    "monitor of nothing": (
        checks.check_monitors,
        lambda o: of_kind(o, "PodMonitor")[0]["spec"]["selector"]["matchLabels"].update(a="b"),
    ),
    "monitor of no port": (
        checks.check_monitors,
        lambda o: of_kind(o, "ServiceMonitor")[0]["spec"]["endpoints"][0].update(port="web"),
    ),
    "monitor with a stray field": (
        checks.check_monitors,
        lambda o: of_kind(o, "ServiceMonitor")[0]["spec"]["endpoints"][0].update(ports="http"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_object_is_complained_of(fault, rendered):
    check, break_it = FAULTS[fault]
    assert list(check(rendered)) == []
    break_it(rendered)
    assert len(list(check(rendered))) >= 1
