"""Owns what has to hold between rendered objects, which no Kubernetes schema says; every check returns its complaints."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]

WORKLOADS = ("Deployment", "StatefulSet")
MONITORS = ("ServiceMonitor", "PodMonitor")
HANDLERS = {"exec", "grpc", "httpGet", "tcpSocket"}
MAX_PORT = 65535
BINARY_BYTES = {"Mi": 1 << 20, "Gi": 1 << 30}

_DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"([0-9]+(\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_SPEC_FIELDS = {
    "ServiceMonitor": {"selector", "endpoints", "namespaceSelector"},
    "PodMonitor": {"selector", "podMetricsEndpoints", "namespaceSelector"},
}
_ENDPOINT_FIELDS = {"port", "path", "interval", "scheme", "scrapeTimeout"}


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    """Objects of these kinds, in order."""
    return [item for item in objects if item["kind"] in kinds]


def label(item: Object) -> str:
    """Kind and name, for messages."""
    return f"{item['kind']} {item['metadata']['name']}"


def pod_spec(workload: Object) -> dict[str, Any]:
    """The pod template's spec."""
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def containers(objects: Sequence[Object]) -> Iterator[tuple[Object, dict[str, Any]]]:
    """Each (workload, container)."""
    for workload in of_kind(objects, *WORKLOADS):
        for container in pod_spec(workload)["containers"]:
            yield workload, container


def selected(objects: Sequence[Object], selector: Mapping[str, str]) -> list[Object]:
    """Workloads whose pods a selector takes."""
    return [
        workload
        for workload in of_kind(objects, *WORKLOADS)
        if selector.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    ]


def port_names(workload: Object) -> set[str]:
    """Names of the ports of a workload's containers."""
    return {port["name"] for container in pod_spec(workload)["containers"] for port in container["ports"]}


def size_bytes(quantity: str) -> int:
    """Bytes of a quantity in Mi or Gi."""
    return int(quantity[:-2]) * BINARY_BYTES[quantity[-2:]]


def check_names(objects: Sequence[Object]) -> Iterator[str]:
    """Names and label values that the API server refuses, or that a controller makes too long."""
    for item in objects:
        name, meta = item["metadata"]["name"], item["metadata"]
        pattern = _DNS_1035 if item["kind"] == "Service" else _DNS_1123
        if not isinstance(name, str) or not pattern.fullmatch(name):
            yield f"{label(item)}: bad name"
        if item["kind"] == "StatefulSet" and len(str(name)) > 52:
            yield f"{label(item)}: its pods' controller-revision-hash label would be longer than 63"
        if not isinstance(meta.get("namespace"), str):
            yield f"{label(item)}: namespace {meta.get('namespace')!r} is no string"
        template = item["spec"]["template"]["metadata"]["labels"] if item["kind"] in WORKLOADS else {}
        for key, value in [*meta["labels"].items(), *template.items()]:
            if not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value):
                yield f"{label(item)}: label {key}={value!r}"
    for (kind, name), count in Counter((item["kind"], item["metadata"]["name"]) for item in objects).items():
        if count > 1:
            yield f"{kind} {name}: {count} of them"


def check_selectors(objects: Sequence[Object]) -> Iterator[str]:
    """Selectors that take no pods, or another workload's."""
    for workload in of_kind(objects, *WORKLOADS):
        taken = selected(objects, workload["spec"]["selector"]["matchLabels"])
        if [label(item) for item in taken] != [label(workload)]:
            yield f"{label(workload)}: its selector takes {[label(item) for item in taken]}"
    for item in of_kind(objects, "Service", "PodDisruptionBudget"):
        spec = item["spec"]
        taken = selected(objects, spec["selector"] if item["kind"] == "Service" else spec["selector"]["matchLabels"])
        if len(taken) != 1:
            yield f"{label(item)}: selects {[label(one) for one in taken]}"
        elif item["kind"] == "PodDisruptionBudget" and (taken[0]["spec"]["replicas"] < 2 or "minAvailable" in spec):
            yield f"{label(item)}: cannot act on {label(taken[0])}"


def check_ports(objects: Sequence[Object]) -> Iterator[str]:
    """Ports out of range, twice, or named where no container has them."""
    for workload, container in containers(objects):
        ports = container["ports"]
        if len({port["name"] for port in ports}) != len(ports) or len({p["containerPort"] for p in ports}) != len(
            ports
        ):
            yield f"{label(workload)}: a container port twice"
        yield from (
            f"{label(workload)}: port {port['containerPort']}"
            for port in ports
            if not 0 < port["containerPort"] <= MAX_PORT
        )
    for service in of_kind(objects, "Service"):
        known = set().union(*(port_names(item) for item in selected(objects, service["spec"]["selector"])))
        numbers = [port["port"] for port in service["spec"]["ports"]]
        if len(set(numbers)) != len(numbers):
            yield f"{label(service)}: a port twice: {numbers}"
        for port in service["spec"]["ports"]:
            if not 0 < port["port"] <= MAX_PORT:
                yield f"{label(service)}: port {port['port']}"
            if port["targetPort"] not in known:
                yield f"{label(service)}: targetPort {port['targetPort']} is none of {sorted(known)}"


def check_volumes(objects: Sequence[Object]) -> Iterator[str]:
    """Mounts without a volume, volumes without a mount, two mounts at one place."""
    for workload in of_kind(objects, *WORKLOADS):
        declared = {volume["name"] for volume in pod_spec(workload)["volumes"]}
        mounts = [mount for container in pod_spec(workload)["containers"] for mount in container["volumeMounts"]]
        if declared != {mount["name"] for mount in mounts}:
            yield f"{label(workload)}: volumes {sorted(declared)}, mounts {sorted(mount['name'] for mount in mounts)}"
        if len({mount["mountPath"] for mount in mounts}) != len(mounts):
            yield f"{label(workload)}: two mounts at one path"


def check_resources(objects: Sequence[Object]) -> Iterator[str]:
    """Quantities that do not parse, requests over limits, and memory volumes that the limit does not hold."""
    for workload, container in containers(objects):
        for kind, amounts in container["resources"].items():
            for resource, amount in amounts.items():
                if not isinstance(amount, str) or not _QUANTITY.fullmatch(amount):
                    yield f"{label(workload)}: {kind}.{resource} {amount!r}"
    for workload in of_kind(objects, *WORKLOADS):
        empty_dirs = [volume["emptyDir"] for volume in pod_spec(workload)["volumes"] if volume.get("emptyDir")]
        for volume in empty_dirs:
            if not _QUANTITY.fullmatch(volume["sizeLimit"]):
                yield f"{label(workload)}: sizeLimit {volume['sizeLimit']!r}"
        limits = [container["resources"]["limits"].get("memory") for container in pod_spec(workload)["containers"]]
        in_memory = sum(size_bytes(v["sizeLimit"]) for v in empty_dirs if v.get("medium") == "Memory")
        if None in limits or sum(size_bytes(limit) for limit in limits) <= in_memory:
            yield f"{label(workload)}: memory limits {limits} do not hold {in_memory} bytes of memory volumes"


def check_probes(objects: Sequence[Object]) -> Iterator[str]:
    """Probes with no or two handlers, at ports that are not there, and liveness that asks what readiness asks."""
    for workload, container in containers(objects):
        names = {port["name"] for port in container["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(kind, {})
            handlers = probe.keys() & HANDLERS
            if len(handlers) != 1:
                yield f"{label(workload)}: {kind} has {len(handlers)} handlers"
            if "httpGet" in probe and probe["httpGet"]["port"] not in names:
                yield f"{label(workload)}: {kind} asks port {probe['httpGet']['port']}"
        live, ready = (
            {k: v for k, v in container[f"{kind}nessProbe"].items() if k in HANDLERS} for kind in ("live", "readi")
        )
        if live == ready:
            yield f"{label(workload)}: liveness asks what readiness asks"


def check_references(objects: Sequence[Object], *, accounts: Sequence[str] = ()) -> Iterator[str]:
    """ConfigMaps, ServiceAccounts and governing Services that nobody made.

    Args:
        objects: Rendered objects.
        accounts: ServiceAccounts that are there before.
    """
    known = {(item["kind"], item["metadata"]["name"]) for item in objects}
    for workload, container in containers(objects):
        account = pod_spec(workload)["serviceAccountName"]
        if account not in accounts and ("ServiceAccount", account) not in known:
            yield f"{label(workload)}: no ServiceAccount {account!r}"
        for source in container.get("envFrom", ()):
            if ("ConfigMap", source["configMapRef"]["name"]) not in known:
                yield f"{label(workload)}: no ConfigMap {source['configMapRef']['name']!r}"
    for item in of_kind(objects, "StatefulSet"):
        name = item["spec"]["serviceName"]
        service = next((s for s in of_kind(objects, "Service") if s["metadata"]["name"] == name), None)
        if service is None or service["spec"].get("clusterIP") != "None":
            yield f"{label(item)}: no headless Service {name!r}"


def check_hardening(objects: Sequence[Object]) -> Iterator[str]:
    """Pods that could write where they should not, become root, or talk to the Kubernetes API."""
    for workload, container in containers(objects):
        spec = pod_spec(workload)
        pod, own = spec["securityContext"], container["securityContext"]
        kept = {
            "runAsNonRoot": pod.get("runAsNonRoot") is True and pod.get("runAsUser", 0) > 0,
            "seccomp": pod.get("seccompProfile") == {"type": "RuntimeDefault"},
            "read-only root": own.get("readOnlyRootFilesystem") is True,
            "no escalation": own.get("allowPrivilegeEscalation") is False,
            "no capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            "no API token": spec.get("automountServiceAccountToken") is False,
            "models read-only": all(m.get("readOnly") for m in container["volumeMounts"] if m["name"] == "models"),
            "fixed image": not container["image"].endswith(":latest")
            and re.search(r"[:@]", container["image"]) is not None,
        }
        yield from (f"{label(workload)}: {rule} is not kept" for rule, holds in kept.items() if not holds)


def check_monitors(objects: Sequence[Object]) -> Iterator[str]:
    """Monitors that select nothing, scrape a port that is not there, or hold fields their definitions do not have."""
    for item in of_kind(objects, *MONITORS):
        spec, wanted = item["spec"], item["spec"]["selector"]["matchLabels"]
        endpoints = spec.get("endpoints" if item["kind"] == "ServiceMonitor" else "podMetricsEndpoints", [])
        if item["kind"] == "ServiceMonitor":
            services = [s for s in of_kind(objects, "Service") if wanted.items() <= s["metadata"]["labels"].items()]
            ports = [{port["name"] for port in service["spec"]["ports"]} for service in services]
        else:
            ports = [port_names(workload) for workload in selected(objects, wanted)]
        if not ports:
            yield f"{label(item)}: selects nothing"
        if not endpoints:
            yield f"{label(item)}: has no endpoints"
        for endpoint in endpoints:
            if not all(endpoint["port"] in names for names in ports):
                yield f"{label(item)}: port {endpoint['port']} is not on all that it selects"
        stray = (spec.keys() - _SPEC_FIELDS[item["kind"]]) | {
            key for e in endpoints for key in e.keys() - _ENDPOINT_FIELDS
        }
        if stray:
            yield f"{label(item)}: unknown fields {sorted(stray)}"
