"""Both /metrics pages: accepted by Prometheus' own tool, and true to the last id."""

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.console import ask
from tests.e2e.serving import until
from tests.modules import map_of

pytestmark = pytest.mark.e2e
TOOLS = Path(__file__).parents[2] / ".cache/tools/bin"


def promtool() -> str:
    found = shutil.which("promtool", path=f"{TOOLS}:/usr/bin:/usr/local/bin")
    assert found, "no promtool: run `make setup`"
    return found


def scrape(url: str) -> dict[tuple[str, frozenset], float]:
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(value for (found, having), value in samples.items() if found == name and wanted <= having)


def test_promtool_accepts_both_pages(clicks):
    serving, _ = clicks
    for url in (f"{serving.http_url}/metrics", serving.triton_metrics):
        with urllib.request.urlopen(url, timeout=10) as response:
            page = response.read()
        done = subprocess.run([promtool(), "check", "metrics"], input=page, capture_output=True, check=False)
        problems = [line for line in (done.stdout + done.stderr).decode().splitlines() if line.startswith("kjtserve_")]
        assert not problems, problems
        assert done.returncode in {0, 3}, done.stderr.decode()  # 3: Triton's own names break a naming habit


def test_counters_hold_what_follows_from_the_requests(clicks):
    serving, case = clicks
    known_users, known_items = (list(map_of(case.module, table))[:5] for table in ("user", "item"))
    gone = case.evicted["user"][0]
    requests = [
        {"user": [[known_users[0], known_users[0], known_users[1]], [-1]], "item": [[known_items[0]], []]},
        {"user": [[gone, 2**63 - 1, 12345]], "item": [[known_items[1], known_items[2], -9]]},
        {"user": [[]], "item": [[]]},
    ]
    before_front, before_shard = scrape(f"{serving.http_url}/metrics"), scrape(serving.triton_metrics)
    for features in requests:
        ask(serving.http_url, "clicks", features)
    body = json.dumps({"features": {"user": [[1]]}}).encode()
    refused = urllib.request.Request(
        f"{serving.http_url}/v1/collections/clicks:lookup", data=body, headers={"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(refused, timeout=10)
    after_front = scrape(f"{serving.http_url}/metrics")

    def front(name, **labels):
        return total(after_front, name, **labels) - total(before_front, name, **labels)

    def shard(name, **labels):
        return total(scrape(serving.triton_metrics), name, **labels) - total(before_shard, name, **labels)

    assert front("kjtserve_requests_total", route="rest_lookup", code="ok") == 3
    assert front("kjtserve_requests_total", route="rest_lookup", code="invalid_argument") == 1
    assert front("kjtserve_request_seconds_count", route="rest_lookup") == 4
    assert front("kjtserve_ids_total", table="user") == 7
    assert front("kjtserve_ids_total", table="item") == 4
    assert front("kjtserve_unique_ids_total", table="user") == 6
    assert front("kjtserve_unique_ids_total", table="item") == 4
    assert front("kjtserve_hot_ids_total") == 0
    assert front("kjtserve_batch_ids_count") == 3
    assert front("kjtserve_batch_ids_sum") == 11
    assert total(after_front, "kjtserve_inflight_requests") == 0
    assert total(after_front, "kjtserve_version", collection="clicks") == 1
    assert (
        total(after_front, "kjtserve_version_created_timestamp_seconds", collection="clicks") == case.manifest.created_s
    )
    assert total(after_front, "kjtserve_version_switches_total", collection="clicks", result="ok") == 1
    until(lambda: shard("kjtserve_remap_ids_total") == 10, 5, "remap_ids_total adds up to the unique ids sent")
    assert shard("kjtserve_remap_ids_total", table="user", outcome="hit") == 2
    assert shard("kjtserve_remap_ids_total", table="user", outcome="unknown") == 4
    assert shard("kjtserve_remap_ids_total", table="item", outcome="hit") == 3
    assert shard("kjtserve_remap_ids_total", table="item", outcome="unknown") == 1


def test_occupancy_equals_the_modules_own_count(clicks):
    serving, case = clicks
    samples = scrape(serving.triton_metrics)
    open_slots = case.module._managed_collision_collection.open_slots()
    for table in ("user", "item"):
        assert total(samples, "kjtserve_zch_open_slots", collection="clicks", table=table) == int(open_slots[table])
        assert total(samples, "kjtserve_zch_rows", collection="clicks", table=table) == len(map_of(case.module, table))
