"""Owns the last step of ``make serve``: serves the sample and shows one lookup once every shard answers."""

import asyncio
import json
import os
import sys
import time

from examples.modules import sample_folder
from examples.sample import COLLECTION, repo_folder
from export.contract import UserError
from service.console import ask, curl_line, render_table
from service.server import Running, read_settings, run_server

STARTED = time.monotonic()


def show_lookup(running: Running) -> None:
    """Look up a known, an evicted and a never-seen id of each table, and print the answer and the curl line for it."""
    listed = json.loads((sample_folder() / "known_ids.json").read_text())
    features = {
        table["feature"]: [[table[kind][0]["id"] for kind in ("known", "evicted", "never_seen")]]
        for table in listed.values()
    }
    answer = ask(running.http_url, COLLECTION, features)
    print(f"\nup in {time.monotonic() - STARTED:.1f} s; a known, an evicted and a never-seen id of each table:\n")
    print(render_table(answer))
    print(f"\n{curl_line(running.http_url, COLLECTION, features)}\n")
    print(
        f"HTTP {running.http_url} (try /docs and /metrics), gRPC {running.grpc_address}. Ctrl-C stops it.", flush=True
    )


def main() -> None:
    """Serve until Ctrl-C or SIGTERM; exit 0 then, 1 with one line if it cannot be served."""
    settings = read_settings(log_json=os.environ.get("KJTSERVE_LOG_JSON", "false"))
    try:
        asyncio.run(run_server(repo_folder(), settings, on_ready=show_lookup))
    except UserError as exc:
        sys.exit(f"serve: {exc}")


if __name__ == "__main__":
    main()
