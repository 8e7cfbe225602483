"""Owns running the real Helms on the chart; a render is cached, because each takes a process."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "kjtserve"
TOOLS = ROOT / ".cache" / "tools" / "bin"
HELMS = ("helm-4.3", "helm-3.17")
KUBE_VERSIONS = ("1.25", "1.31", "1.37")
MONITORING = "monitoring.coreos.com/v1"
TIMEOUT_S = 60


def tool(name: str) -> Path:
    """Path of a pinned tool; AssertionError that says what to do when it is not there."""
    path = TOOLS / name
    assert path.is_file(), f"{name} is not in {TOOLS}: run `make setup`, which fetches it"
    return path


def run_helm(helm: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run one Helm without a cluster, and without the caller's Helm configuration."""
    with tempfile.TemporaryDirectory() as home:
        env = {"PATH": os.environ["PATH"], "HOME": home, "HELM_NAMESPACE": "ranking"}
        return subprocess.run(
            [str(tool(helm)), *args], env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )


@dataclass(frozen=True, kw_only=True)
class Render:
    """What to render, and how; ``values`` as Helm reads them from a file."""

    helm: str = HELMS[0]
    release: str = "prod"
    namespace: str = "ranking"
    kube_version: str = "1.31"
    apis: Sequence[str] = (MONITORING,)
    values: Mapping[str, Any] = field(default_factory=dict)

    def run(self, chart: Path = CHART) -> subprocess.CompletedProcess[str]:
        """Run ``helm template``."""
        return _template(
            helm=self.helm,
            release=self.release,
            namespace=self.namespace,
            kube_version=self.kube_version,
            apis=tuple(self.apis),
            values=json.dumps(dict(self.values)),
            chart=str(chart),
        )

    def objects(self, chart: Path = CHART) -> list[dict[str, Any]]:
        """The rendered objects; AssertionError with Helm's message if it refuses."""
        done = self.run(chart)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document is not None]


@cache
def _template(
    *, helm: str, release: str, namespace: str, kube_version: str, apis: tuple[str, ...], values: str, chart: str
) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(values)
        file.flush()
        args = ["template", release, chart, "--namespace", namespace, "--kube-version", kube_version]
        args += [arg for api in apis for arg in ("--api-versions", api)]
        return run_helm(helm, *args, "--values", file.name)


CASES: dict[str, Render] = {
    "defaults": Render(),
    "many_shards": Render(
        values={
            "collections": ["clicks", "views.v2"],
            "shards": {"count": 4, "replicas": 3, "extraArgs": ["--log-verbose=1"]},
            "front": {"replicas": 4, "service": {"type": "LoadBalancer", "httpPort": 80, "grpcPort": 9000}},
        }
    ),
    "single_pods": Render(values={"shards": {"count": 2}, "front": {"replicas": 1}}),
    "tuned": Render(
        values={
            "image": {
                "registry": "registry.example.com:5000",
                "repository": "ml/kjtserve",
                "digest": "sha256:" + "ab" * 32,
            },
            "imagePullSecrets": ["pull"],
            "models": {"subPath": "prod", "mountPath": "/srv/models", "claimName": "artifacts"},
            "serviceAccount": {"annotations": {"example.com/role": "reader"}},
            "shards": {
                "shmSize": "512Mi",
                "resources": {"limits": {"cpu": 4, "memory": "9000Mi"}},
                "podAnnotations": {"example.com/team": "ranking"},
                "nodeSelector": {"disk": "nvme"},
                "tolerations": [{"key": "big", "operator": "Exists", "effect": "NoSchedule"}],
                "startup": {"artifactGiB": 40.5},
            },
            "front": {
                "settings": {"max_request_bytes": 134217728, "default_timeout_s": 2.5, "log_json": False},
                "service": {"annotations": {"example.com/internal": "true"}},
                "tolerations": [{"key": "web", "operator": "Equal", "value": "yes"}],
            },
            "monitoring": {"labels": {"release": "prometheus"}, "interval": "1m"},
        }
    ),
    "without_volume_or_account": Render(
        values={"models": {"source": "emptyDir"}, "serviceAccount": {"create": False, "name": "shared"}}
    ),
    "numbers_for_names": Render(
        release="12345",
        namespace="777",
        values={
            "nameOverride": "99",
            "serviceAccount": {"name": "42"},
            "models": {"claimName": "123", "subPath": "1e3"},
            "image": {"tag": "1.10"},
        },
    ),
    "longest_names": Render(
        release="a.release-with-" + "x" * 38,
        namespace="n" * 63,
        values={"nameOverride": "y" * 60, "shards": {"count": 2, "replicas": 2}},
    ),
}
