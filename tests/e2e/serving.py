"""A real ``kjtserve serve`` in a process of its own, with the real Triton behind it."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

KJTSERVE = Path(sys.executable).parent / "kjtserve"

PR_SET_PDEATHSIG = 1
_RUN = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGTERM)})
os.execv(sys.argv[1], sys.argv[1:])
"""
END_WITH_PARENT = (sys.executable, "-I", "-S", "-c", _RUN)
"""Runs a command that is told to end when the tests are killed. A program of its own, as a fork of this process with
its threads should run no Python."""


def until(condition: Callable[[], object], timeout_s: float, what: str):
    """The first true result of ``condition``; fails with ``what`` when none comes in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {timeout_s} s")


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty once it has ended, also while Triton has not reaped it."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@dataclass
class Serving:
    process: subprocess.Popen
    log_path: Path
    http: str = ""
    grpc: str = ""
    triton_metrics: str = ""

    def events(self, name: str) -> list[dict]:
        found = []
        for line in self.log_path.read_text().splitlines():
            if line.startswith("{"):
                event = json.loads(line)
                if event.get("event") == name:
                    found.append(event)
        return found

    def log(self) -> str:
        return self.log_path.read_text()[-6000:]

    def await_event(self, name: str, timeout_s: float = 400.0) -> dict:
        def look() -> dict | None:
            assert self.process.poll() is None, f"kjtserve ended with {self.process.returncode}:\n{self.log()}"
            return next(iter(self.events(name)), None)

        try:
            return until(look, timeout_s, f"log event {name}")
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.log()}") from None

    @property
    def http_url(self) -> str:
        return f"http://{self.http}"

    def get(self, path: str, timeout_s: float = 5.0) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.http_url + path, timeout=timeout_s) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as exc:
            return exc.code, exc.read().decode()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def shard_process(self, model: str) -> psutil.Process:
        """The Python backend process of one model."""
        for child in self.children():
            command = command_of(child)
            # A process that is just being started may show a part of its command line.
            if len(command) > 1 and "triton_python_backend_stub" in command[0] and f"/{model}/" in command[1]:
                return child
        raise AssertionError(f"no process of {model} among {[command_of(child)[:2] for child in self.children()]}")


@contextmanager
def launch(
    repo: Path, log_path: Path, *arguments: str, env: dict[str, str] | None = None, command: Sequence[str] = ()
) -> Iterator[Serving]:
    """Start it, and end whatever is left of it when the test is over, or when the tests are killed."""
    usual = [str(KJTSERVE), "serve", str(repo), "--http-port", "0", "--grpc-port", "0", *arguments]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*END_WITH_PARENT, *(command or usual)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "KJTSERVE_PROBE_INTERVAL_S": "0.2", **(env or {})},
            start_new_session=True,
        )
    serving = Serving(process, log_path)
    try:
        yield serving
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
                raise AssertionError(f"kjtserve did not stop on SIGTERM:\n{serving.log()}") from None


@contextmanager
def serve(repo: Path, log_path: Path, *arguments: str, **options) -> Iterator[Serving]:
    """A front tier that is ready."""
    with launch(repo, log_path, *arguments, **options) as serving:
        event = serving.await_event("serving")
        serving.http, serving.grpc = event["http"].removeprefix("http://"), event["grpc"]
        serving.triton_metrics = event.get("triton_metrics") or ""
        serving.await_event("ready")
        yield serving
