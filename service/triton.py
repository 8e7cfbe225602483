"""Owns the Triton that ``kjtserve serve`` starts for itself: start, watch, repair, stop. Must not look up an id.

A server that is killed leaves its model processes for seconds and their shared memory for ever: ``triton_guard`` sees
to both. A model process that dies stays dead: ``triton_repair`` brings it back.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from service import triton_guard
from service.triton_control import ModelState, TritonCallError, read_index, read_server_id
from service.triton_files import Installation, build_backends, check_system, server_environment
from service.triton_log import TritonStartError, find_complaint, first_line, read_tail
from service.triton_repair import STABLE_S, ModelRepairs, backoff_s

log = structlog.get_logger(__name__)

HOST = "127.0.0.1"
PORT_TRIES = 5
CHECK_INTERVAL_S = 1.0
"""Seconds between two looks at the model processes."""
METRICS_TIMEOUT_S = 5.0

_POLL_S = 0.05


class _PortTakenError(TritonStartError):
    """Somebody took a port between our look and Triton's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ports:
    grpc: int
    metrics: int


class TritonServer:
    """A Triton on free loopback ports, its model processes, and the watch over both.

    Args:
        repo: Model repository.
        models: Names of the Triton models to load, every version that their configuration asks for.
        log_path: Where Triton's own output is appended; None: to a file that ends with the server.
        grace_s: Time that Triton has to end by itself when told to.
        start_timeout_s: Time that it has to come up with every model.
    """

    def __init__(
        self,
        repo: Path,
        models: Sequence[str],
        *,
        log_path: Path | None = None,
        grace_s: float = 10.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._repo = repo.absolute()
        self._models = tuple(models)
        self._log_path = log_path
        self._grace_s = grace_s
        self._start_timeout_s = start_timeout_s
        self._repairs = ModelRepairs(self._repo, models)
        self._installation: Installation | None = None
        self._directory: Path | None = None
        self._ports: _Ports | None = None
        self._guard: asyncio.subprocess.Process | None = None
        self._log_start = 0
        self._stopping = False
        self.shm_prefix = ""
        """What the names of this server's shared memory regions start with; another one for every start."""

    @property
    def grpc_address(self) -> str:
        """``HOST:PORT`` of the gRPC service; the same over restarts."""
        return f"{HOST}:{self._known_ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """Triton's own metrics page, the shards' metrics on it."""
        return f"http://{HOST}:{self._known_ports.metrics}/metrics"

    @property
    def running(self) -> bool:
        """Whether the server's process is there."""
        return self._guard is not None and self._guard.returncode is None

    @property
    def log_path(self) -> Path:
        """File with Triton's own output."""
        return self._log_path or self._run_directory / "triton.log"

    async def start(self) -> None:
        """Start Triton and wait until every model answers for at least one version.

        Raises:
            TritonSetupError: Something is missing on this machine.
            TritonStartError: Triton ended, a model did not load, or it took too long.
        """
        self._installation = await asyncio.to_thread(check_system, num_models=len(self._models))
        self._directory = Path(tempfile.mkdtemp(prefix="kjtserve-triton-"))
        await asyncio.to_thread(build_backends, self._installation, self._directory / "backends")
        for remaining in reversed(range(PORT_TRIES)):
            self._ports = _free_ports()
            try:
                await self._launch()
            except _PortTakenError:
                if not remaining:
                    raise
                continue
            return

    async def watch(self) -> None:
        """Restart a server that ended, repair models whose process died; returns when ``stop`` is called."""
        failures = 0
        while True:
            up_since_s = time.monotonic()
            code = await self._until_end()
            if self._stopping:
                return
            failures = 1 if time.monotonic() - up_since_s > STABLE_S else failures + 1
            log.error("triton_ended", exit_code=code, restart_in_s=backoff_s(failures))
            await asyncio.sleep(backoff_s(failures))
            try:
                await self._launch()
            except TritonStartError as exc:
                log.error("triton_restart_failed", error=str(exc))  # noqa: TRY400 - its message says it all
            else:
                log.warning("triton_restarted")

    async def repair(self, model: str) -> None:
        """Bring back a model of which Triton says that its process is not healthy; waits out the model's back-off.

        Raises:
            TritonCallError: It did not come back.
        """
        await self._repairs.repair(model)

    async def stop(self) -> None:
        """End Triton and everything of it; does nothing if there is nothing."""
        self._stopping = True
        await self._end_guard()
        if self._directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    @property
    def _known_ports(self) -> _Ports:
        assert self._ports is not None, "the server was not started"
        return self._ports

    @property
    def _run_directory(self) -> Path:
        assert self._directory is not None, "the server was not started"
        return self._directory

    async def _launch(self) -> None:
        """Start one server process and wait for it; on failure nothing of it is left."""
        self.shm_prefix = f"{triton_guard.PREFIX_START}{secrets.token_hex(6)}_"
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        guard = (sys.executable, "-I", "-S", triton_guard.__file__, "--shm-prefix", self.shm_prefix)
        options = ("--grace-s", str(self._grace_s), "--remove", str(self._run_directory), "--")
        assert self._installation is not None
        environment = server_environment(self._installation, os.environ, num_models=len(self._models))
        with self.log_path.open("ab") as output:
            self._guard = await asyncio.create_subprocess_exec(
                *guard,
                *options,
                *self._command(self._installation),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the front tier, which then stops Triton in its own order
            )
        try:
            await self._until_ready(self._guard)
        except TritonStartError:
            await self._end_guard()
            raise
        self._repairs.attach(self.grpc_address, self.shm_prefix)

    def _command(self, installation: Installation) -> list[str]:
        ports = self._known_ports
        return [
            str(installation.server),
            f"--id={self.shm_prefix}",
            f"--model-repository={self._repo}",
            f"--backend-directory={self._run_directory / 'backends'}",
            "--model-control-mode=explicit",
            *(f"--load-model={model}" for model in self._models),
            "--exit-on-error=false",  # a bad version must not take the good ones down
            "--disable-auto-complete-config",  # would start every model process once more, to ask it for its config
            f"--exit-timeout-secs={max(1, int(self._grace_s))}",
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            f"--backend-config=python,stub-timeout-seconds={max(1, int(self._start_timeout_s))}",
            "--allow-http=false",
            f"--grpc-address={HOST}",
            f"--grpc-port={ports.grpc}",
            f"--metrics-address={HOST}",
            f"--metrics-port={ports.metrics}",
        ]

    async def _until_ready(self, guard: asyncio.subprocess.Process) -> None:
        """Wait for a server that answers under our id, has every model and its metrics page."""
        deadline_s = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline_s:
            if guard.returncode is not None:
                raise self._start_error(f"Triton ended with code {guard.returncode}")
            try:
                # Whoever else listens on the port, if we lost it, has another id.
                if await read_server_id(self.grpc_address) == self.shm_prefix:
                    self._check_index(await read_index(self.grpc_address))
                    if not await _serves_metrics(self._known_ports.metrics):
                        raise _PortTakenError(f"Triton has no metrics page at {self.metrics_url}: the port is in use")
                    return
            except TritonCallError:
                pass
            await asyncio.sleep(_POLL_S)
        raise self._start_error(f"Triton was not ready within {self._start_timeout_s:.0f} s")

    def _check_index(self, index: Sequence[ModelState]) -> None:
        for model in self._models:
            states = [state for state in index if state.model == model]
            for state in states:
                if not state.ready and state.reason not in {"", "unloaded"}:
                    log.error(
                        "triton_version_failed", model=model, version=state.version, reason=first_line(state.reason)
                    )
            if not any(state.ready for state in states):
                reasons = [f"version {state.version}: {first_line(state.reason)}" for state in states if state.version]
                why = "; ".join(reasons) or f"{self._repo} holds no such model"
                raise self._start_error(f"Triton did not load {model}: {why}", find_reason=False)

    def _start_error(self, message: str, *, find_reason: bool = True) -> TritonStartError:
        tail = read_tail(self.log_path, self._log_start)
        complaint = find_complaint(tail) if find_reason else ""
        kind = _PortTakenError if "already in use" in complaint else TritonStartError
        where = f" (its log: {self._log_path})" if self._log_path else ""
        return kind(": ".join(filter(None, [message, complaint])) + where, log_tail=tail)

    async def _until_end(self) -> int:
        """Wait for the server's end, and mind its model processes meanwhile."""
        assert self._guard is not None
        minding = asyncio.create_task(self._mind_models())
        try:
            return await self._guard.wait()
        finally:
            minding.cancel()
            await asyncio.gather(minding, return_exceptions=True)

    async def _mind_models(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self._repairs.repair_dead()

    async def _end_guard(self) -> None:
        guard = self._guard
        if guard is None or guard.stdin is None:
            return
        if guard.returncode is None:
            guard.stdin.write(b"s")  # a mere end of file would mean that we were killed
        guard.stdin.close()
        try:
            async with asyncio.timeout(self._grace_s + 5.0):
                await guard.wait()
        except TimeoutError:
            guard.kill()
            await guard.wait()
            triton_guard.remove_regions(self.shm_prefix)


def _free_ports() -> _Ports:
    with socket.create_server((HOST, 0)) as grpc, socket.create_server((HOST, 0)) as metrics:
        return _Ports(grpc=grpc.getsockname()[1], metrics=metrics.getsockname()[1])


async def _serves_metrics(port: int) -> bool:
    """Whether Triton's metrics page is there: it comes after the gRPC service, and a taken port ends Triton then."""
    try:
        async with asyncio.timeout(METRICS_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            with contextlib.closing(writer):
                writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
                page = await reader.read()
    except (OSError, TimeoutError):
        return False
    return b" 200 " in page[:16] and b"\nnv_" in page
