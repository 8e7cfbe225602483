"""Owns the question whether a shard really answers: an empty lookup (N = 0) through Triton to each model.

Triton does not restart a Python stub that died, and its own health endpoints go on saying 200; only an inference
tells. ``python3 -m model_repo.probe live|ready MODEL…`` exits 0, or 1 with one line. Standard library only: a container
runs it every few seconds, so it must start in milliseconds, and must not import torch, numpy or pydantic.
"""

import argparse
import http.client
import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

STUB_DIED = "is not healthy"
"""What every request gets from Triton 2.51 once a model's Python stub has gone (``libtriton_python.so``)."""


class ProbeError(Exception):
    """The shard fails the probe; the message is one line and names the model."""


class Triton:
    """Calls to one server's HTTP port that share one deadline."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self._address = address
        self._deadline_s = time.monotonic() + timeout_s

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """Send one request; return status and text.

        Raises:
            ProbeError: No answer before the deadline.
        """
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise ProbeError(f"no time left for {method} {path}; the server is slow, or --timeout-s too short")
        connection = http.client.HTTPConnection(self._address, timeout=left_s)
        try:
            connection.request(method, path, body=None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace").strip()
        except (OSError, http.client.HTTPException) as exc:
            raise ProbeError(f"{method} http://{self._address}{path}: {exc or type(exc).__name__}") from exc
        finally:
            connection.close()


def count_tables(repo: Path, model: str, version: str) -> int:
    """Number of tables of a shard, from the manifest of its version; 0 if that cannot be read.

    The version directory of a model is a link into its collection's version directory, which holds the manifest.
    """
    try:
        manifest = json.loads(
            (repo / model / version).resolve(strict=True).parent.joinpath("manifest.json").read_bytes()
        )
        return next(len(shard["tables"]) for shard in manifest["shards"] if shard["model"] == model)
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return 0


def empty_lookup(num_tables: int, version: str) -> dict[str, Any]:
    """Body of a KServe v2 inference request for no ids: ids INT64 [0], table_lengths INT64 [T], version INT64 [1]."""
    return {
        "inputs": [
            {"name": "ids", "datatype": "INT64", "shape": [0], "data": []},
            {"name": "table_lengths", "datatype": "INT64", "shape": [num_tables], "data": [0] * num_tables},
            {"name": "version", "datatype": "INT64", "shape": [1], "data": [int(version)]},
        ]
    }


def check_model(triton: Triton, model: str, repo: Path, *, ready: bool) -> None:
    """Look nothing up in every loaded version of a model.

    Args:
        triton: The server.
        model: Name of the Triton model.
        repo: The model repository as this process sees it.
        ready: True: the model must be loaded, and each lookup must succeed. False: only a lookup that tells of a dead
            process counts; restarting helps neither a model that is not loaded nor a refused request.

    Raises:
        ProbeError: The model fails; the message says how.
    """
    path = f"/v2/models/{quote(model)}"
    status, text = triton.call("GET", path)
    try:
        versions = [str(version) for version in json.loads(text)["versions"]] if status == http.client.OK else []
    except (ValueError, KeyError, TypeError):
        versions = []
    if ready and not versions:
        raise ProbeError(f"{model}: not loaded ({status}): {text}")
    for version in versions:
        body = empty_lookup(count_tables(repo, model, version), version)
        status, text = triton.call("POST", f"{path}/versions/{quote(version)}/infer", body)
        if STUB_DIED in text or (ready and status != http.client.OK):
            raise ProbeError(f"{model} version {version}: {status}: {text}")


def check_server(triton: Triton, *, ready: bool) -> None:
    """Ask Triton's own health endpoint; raises ProbeError unless it says 200."""
    path = f"/v2/health/{'ready' if ready else 'live'}"
    status, text = triton.call("GET", path)
    if status != http.client.OK:
        raise ProbeError(f"{path} says {status} {text}".strip())


def main(argv: list[str] | None = None) -> int:
    """Run the probe; 0 if the shard is well, 1 with one line on stderr if not, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python3 -m model_repo.probe", description="Ask a shard for nothing.")
    parser.add_argument(
        "question",
        choices=("live", "ready"),
        help="live: would a restart help? ready: is each model loaded, and does it answer?",
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="names of the Triton models")
    parser.add_argument("--http", default="127.0.0.1:8000", metavar="HOST:PORT", help="Triton's HTTP port")
    parser.add_argument("--repo", type=Path, default=Path("/models"), help="the model repository that Triton serves")
    parser.add_argument("--timeout-s", type=float, default=4.0, help="for all models together")
    args = parser.parse_args(argv)
    ready = args.question == "ready"
    triton = Triton(args.http, timeout_s=args.timeout_s)
    try:
        check_server(triton, ready=ready)
        for model in args.models:
            check_model(triton, model, args.repo, ready=ready)
    except ProbeError as exc:
        sys.stderr.write(f"probe: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
