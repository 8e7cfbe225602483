"""Memory while versions change: flat over many deltas, the base mapped once, two of them at most, no private copy."""

import json
import re
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from export import DeltaPublisher
from model_repo.deltas import KEPT
from tests.e2e.serving import command_of, serve, until
from tests.e2e.test_versions import metric
from tests.modules import plain_collection

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

ROWS, DIM = 200_000, 128
BASE_BYTES = ROWS * DIM * 4
DELTAS = 50
SETTLED = 12
"""Deltas after which everything that is kept has been there once."""
SLACK = 24 << 20


def mappings(pid):
    """By mapped file: its numbers in /proc/PID/smaps, bytes."""
    found: dict[str, Counter] = {}
    try:
        text = Path(f"/proc/{pid}/smaps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return found
    path = ""
    for line in text.splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            path = line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) > 5 else ""
        elif line.split(":")[0] in {"Rss", "Pss", "Private_Dirty"}:
            name, kilobytes = line.split(":")
            found.setdefault(path, Counter())[name] += int(kilobytes.split()[0]) << 10
    return found


def of_kind(serving, ending):
    """(process, file) → numbers, of all files that end so and are mapped by a model process."""
    return {
        (child.pid, path): numbers
        for child in serving.children()
        if "triton_python_backend_stub" in "".join(command_of(child)[:1])
        for path, numbers in mappings(child.pid).items()
        if path.endswith(ending)
    }


def footprint(serving):
    """By process, anonymous memory and file descriptors."""
    found = {}
    for process in [psutil.Process(serving.process.pid), *serving.children()]:
        status = Path(f"/proc/{process.pid}/status").read_text()
        anonymous = int(re.search(r"RssAnon:\s+(\d+)", status)[1]) << 10
        found[process.pid, process.name()] = anonymous, process.num_fds()
    return found


def look_up(serving, ids):
    body = json.dumps({"features": {"t": [ids]}, "row_ids": True}).encode()
    request = urllib.request.Request(f"{serving.http_url}/v1/collections/c:lookup", body)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_memory_is_flat_over_many_deltas_and_a_base_is_there_twice_at_most(tmp_path):
    module = plain_collection({"t": ROWS}, dim=DIM)
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    publisher = DeltaPublisher(module, tmp_path / "repo", name="c", every=1e9, max_overlay=1e9, keep=6)
    ids = torch.randint(0, ROWS, (500,), generator=torch.Generator().manual_seed(0))

    def publish(serving):
        optimizer.zero_grad()
        kjt = KeyedJaggedTensor(keys=["t"], values=ids, lengths=torch.tensor([len(ids)]))
        module(kjt)["t"].values().pow(2).sum().backward()
        optimizer.step()
        publisher.publish(wait=True)
        version = publisher.published.version
        until(lambda: metric(serving, "kjtserve_version") == version, 60, f"version {version}")
        assert look_up(serving, ids[:20].tolist())["version"] == version

    with serve(tmp_path / "repo", tmp_path / "serve.log") as serving:
        for start in range(0, ROWS, 10_000):
            look_up(serving, list(range(start, start + 10_000, 7)))
        for at in range(DELTAS):
            publish(serving)
            if at == SETTLED:
                before = footprint(serving)
        after = footprint(serving)
        report = {name: (before[pid, name], after[pid, name]) for pid, name in after}
        print(f"\n(anonymous bytes, file descriptors) after {SETTLED + 1} and {DELTAS} deltas: {report}")
        assert after.keys() == before.keys(), "no process came or went"
        for process, (size, files) in after.items():
            assert size < before[process][0] + SLACK, process
            assert files <= before[process][1] + 2, process
        states = of_kind(serving, "state.safetensors")
        assert len(states) == 1
        (numbers,) = states.values()
        print(f"the base of {BASE_BYTES >> 20} MB, mapped once: { ({k: v >> 20 for k, v in numbers.items()}) } MB")
        assert numbers["Private_Dirty"] == 0
        assert 0.5 * BASE_BYTES < numbers["Rss"] < 1.1 * BASE_BYTES
        assert 1 <= len(of_kind(serving, "overlay.safetensors")) <= KEPT
        most = Counter()
        stop = threading.Event()

        def watch():
            while not stop.is_set():
                held = of_kind(serving, "state.safetensors")
                most["files"] = max(most["files"], len(held))
                for name in ("Pss", "Private_Dirty"):
                    most[name] = max(most[name], sum(numbers[name] for numbers in held.values()))
                time.sleep(0.05)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for _ in range(3):
                publisher._base_every = 0.0
                publish(serving)
        finally:
            stop.set()
            watcher.join()
        print(f"over three switches of base, at most: {dict(most)}")
        assert most["files"] == 2
        assert most["Private_Dirty"] == 0
        assert most["Pss"] < 2.1 * BASE_BYTES
    publisher.close()
