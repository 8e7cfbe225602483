"""Owns the Triton that ``kjtserve serve`` starts for itself: start, watch, repair, stop. Must not look up an id.

A server that is killed leaves its model processes for seconds and their shared memory for ever: ``triton_guard`` sees
to both. A model process that dies stays dead, and a model's own version policy lets go of the version in use:
``triton_repair`` holds the versions that it is told to.
"""

import asyncio
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from service import triton_guard, triton_ports
from service.triton_control import TritonCallError, read_server_id
from service.triton_files import Installation, build_backends, check_system, server_command, server_environment
from service.triton_log import TritonStartError, describe_end, find_complaint, read_tail
from service.triton_ports import HOST, Ports
from service.triton_repair import STABLE_S, HeldModels, backoff_s
from service.triton_versions import choose_versions

log = structlog.get_logger(__name__)

PORT_TRIES = 5
CHECK_INTERVAL_S = 1.0
"""Seconds between two looks at the model processes."""
END_NOTICE_S = 0.5
"""The guard looks at its server more often than that."""

_POLL_S = 0.05


class _PortTakenError(TritonStartError):
    """Somebody took a port between our look and Triton's."""


class TritonServer:
    """A Triton on free loopback ports, its model processes, and the watch over both.

    Args:
        repo: Model repository.
        models: Version numbers to hold of each Triton model, by its name; of mere names, the newest at the start.
        log_path: Where Triton's own output is appended; None: to a file that ends with the server.
        grace_s: Time that Triton has to end by itself when told to.
        start_timeout_s: Time that it has to come up with every model.
    """

    def __init__(
        self,
        repo: Path,
        models: Mapping[str, Sequence[int]] | Sequence[str],
        *,
        log_path: Path | None = None,
        grace_s: float = 10.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._repo = repo.absolute()
        self._models = models
        self._log_path = log_path
        self._grace_s = grace_s
        self._start_timeout_s = start_timeout_s
        self._installation: Installation | None = None
        self._directory: Path | None = None
        self._held: HeldModels | None = None
        self._ports: Ports | None = None
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
        """Start Triton and wait until it holds every version of every model.

        Raises:
            TritonSetupError: Something is missing on this machine.
            RepositoryError: The repository holds no such model.
            TritonStartError: Triton ended, a version did not load, or it took too long.
        """
        self._installation = await asyncio.to_thread(check_system, num_models=len(self._models))
        versions = await asyncio.to_thread(choose_versions, self._repo, self._models)
        self._held = await asyncio.to_thread(HeldModels, self._repo, versions)
        self._directory = Path(tempfile.mkdtemp(prefix="kjtserve-triton-"))
        await asyncio.to_thread(build_backends, self._installation, self._directory / "backends")
        for remaining in reversed(range(PORT_TRIES)):
            self._ports = triton_ports.free_ports()
            try:
                failed = await self._launch()
            except _PortTakenError:
                if not remaining:
                    raise
                continue
            break
        for model, error in failed.items():
            start_error = self._start_error(f"Triton did not load {model}: {error}", find_reason=False)
            await self._end_guard()
            raise start_error

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
                failed = await self._launch()
            except (TritonStartError, OSError) as exc:
                log.error("triton_restart_failed", error=str(exc))  # noqa: TRY400 - its message says it all
                continue
            for model, error in failed.items():  # the others serve; this one is repaired with back-off
                log.error("triton_model_failed", model=model, error=str(error))
            log.warning("triton_restarted")

    async def hold(self, model: str, versions: Sequence[int]) -> None:
        """Hold other versions of a model from now on; the processes of those that it holds already stay.

        Raises:
            RepositoryError: Its configuration cannot be read.
            TritonCallError: A version did not load; then what was held before still is.
        """
        await self._known_models.hold(model, versions)

    async def repair(self, model: str) -> None:
        """Bring back a model of which Triton says that its process is not healthy; see ``HeldModels.repair``.

        Raises:
            TritonCallError: A held version did not come back.
        """
        await self._known_models.repair(model)

    async def stop(self) -> None:
        """End Triton and everything of it; does nothing if there is nothing."""
        self._stopping = True
        if self._held is not None:
            await self._held.close()
        await self._end_guard()
        if self._directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    @property
    def _known_models(self) -> HeldModels:
        assert self._held is not None, "the server was not started"
        return self._held

    @property
    def _known_ports(self) -> Ports:
        assert self._ports is not None, "the server was not started"
        return self._ports

    @property
    def _run_directory(self) -> Path:
        assert self._directory is not None, "the server was not started"
        return self._directory

    async def _launch(self) -> dict[str, TritonCallError]:
        """Start one server process and load its models; on failure nothing of it is left.

        Returns:
            By model, why a version of it did not load.
        """
        self.shm_prefix = f"{triton_guard.PREFIX_START}{secrets.token_hex(6)}_"
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        guard = (sys.executable, "-I", "-S", triton_guard.__file__, "--shm-prefix", self.shm_prefix)
        options = ("--grace-s", str(self._grace_s), "--remove", str(self._run_directory), "--")
        assert self._installation is not None
        backends = self._run_directory / "backends"
        times = {"grace_s": self._grace_s, "stub_timeout_s": self._start_timeout_s}
        command = server_command(
            self._installation, self._repo, backends, self._known_ports, shm_prefix=self.shm_prefix, **times
        )
        environment = server_environment(self._installation, os.environ, num_models=len(self._models))
        with self.log_path.open("ab") as output:
            self._guard = await asyncio.create_subprocess_exec(
                *guard,
                *options,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the front tier, which then stops Triton in its own order
            )
        self._known_models.attach(self.grpc_address, self.shm_prefix)
        try:
            await self._until_answering(self._guard)
            return await self._load_models(self._guard)
        except TritonStartError:
            await self._end_guard()
            raise

    async def _until_answering(self, guard: asyncio.subprocess.Process) -> None:
        """Wait for a server that answers under our id, and for its metrics page."""
        deadline_s = time.monotonic() + self._start_timeout_s
        metrics_deadline_s = deadline_s
        while time.monotonic() < deadline_s:
            if guard.returncode is not None:
                raise self._start_error(describe_end(guard.returncode))
            try:
                # Whoever else listens on the port, if we lost it, has another id.
                if await read_server_id(self.grpc_address) == self.shm_prefix:
                    metrics_deadline_s = min(metrics_deadline_s, time.monotonic() + triton_ports.METRICS_TIMEOUT_S)
                    if await triton_ports.serves_metrics(self._known_ports.metrics):
                        return
                    if time.monotonic() > metrics_deadline_s:
                        raise _PortTakenError(f"Triton has no metrics page at {self.metrics_url}: the port is in use")
            except TritonCallError:
                pass
            await asyncio.sleep(_POLL_S)
        raise self._start_error(f"Triton did not answer within {self._start_timeout_s:.0f} s")

    async def _load_models(self, guard: asyncio.subprocess.Process) -> dict[str, TritonCallError]:
        loading = asyncio.create_task(self._known_models.load_all())
        ended = asyncio.create_task(guard.wait())
        try:
            await asyncio.wait({loading, ended}, timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if (
                loading.done() and loading.result()
            ):  # perhaps because the server died, of which the guard is yet to hear
                await asyncio.wait({ended}, timeout=END_NOTICE_S)
            if ended.done():
                raise self._start_error(describe_end(ended.result()))
            if not loading.done():
                raise self._start_error(f"Triton's models were not ready within {self._start_timeout_s:.0f} s")
            return loading.result()
        finally:
            loading.cancel()
            ended.cancel()
            await asyncio.gather(loading, ended, return_exceptions=True)

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
            try:
                await self._known_models.repair_dead()
            except OSError as exc:
                log.error("triton_look_failed", error=str(exc))  # noqa: TRY400 - its message says it all

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
