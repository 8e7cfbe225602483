"""Owns the export workload: a large table that two ranks saved, exported by two ranks; time, memory and bytes written.

Must not draw a table or a progress bar; what a rank does is in ``benchmarks.exporter``.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.exporter import Figures, figures_of
from benchmarks.report import Measurement
from export.contract import UserError
from export.progress import Progress, silent

RANKS = 2
DIM = 128
ROWS = 8_000_000
"""8 M rows of 128 FP32 numbers are 4 GB."""
QUICK_ROWS = ROWS // 40

PEAK_TARGET_RATIO = 1.2
"""Peak RSS of an exporter by the bytes of the largest table: all of it, though a rank writes its share alone."""
WRITTEN_TARGET_RATIO = 1.01
"""Bytes written by the bytes of the table: every row once, and little else."""

_TIMEOUT_S = 900.0
_LAST_LINE = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*Error: .+)$", re.MULTILINE)
"""Of a traceback."""


def run(rows: int, *, on_progress: Progress = silent) -> list[Measurement]:
    """Save a checkpoint of a table of ``rows`` rows by two ranks, and export it by two ranks of their own.

    Args:
        rows: Of the table; 8 M need 6 GB of memory and 8.4 GB of temporary files.
        on_progress: Told (step, done, of how many).

    Raises:
        UserError: The disk has too little room, or a rank failed; says what it said last.
    """
    with tempfile.TemporaryDirectory(prefix="kjtserve-bench-") as name:
        folder = Path(name)
        table_bytes = rows * DIM * 4
        free, needed = shutil.disk_usage(folder).free, int(2.1 * table_bytes)
        if free < needed:
            raise UserError(
                f"bench: {folder.parent} has {free / 1e9:.1f} GB free, the export needs {needed / 1e9:.1f}; set TMPDIR"
            )
        for step, title in (("save", "saving a checkpoint"), ("export", "exporting it")):
            on_progress(f"{title}, {RANKS} ranks", 0, 1)
            _launch(step, folder, rows)
            on_progress(f"{title}, {RANKS} ranks", 1, 1)
        return _report(rows, [figures_of(folder, rank) for rank in range(RANKS)])


def _launch(step: str, folder: Path, rows: int) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(  # noqa: S603  our own interpreter and module
        [sys.executable, *torchrun, "-m", "benchmarks.exporter", step, str(folder), str(rows), str(DIM)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        said = _LAST_LINE.findall(done.stderr) or ["no message"]
        raise UserError(f"bench: {step} by {RANKS} ranks failed: {said[0]}")


def _report(rows: int, figures: list[Figures]) -> list[Measurement]:
    whole = rows >= ROWS
    table_bytes = rows * DIM * 4
    workload = f"export by {RANKS} ranks"
    setting = f"{rows / 1e6:g} M rows × {DIM}, {table_bytes / 1e6:.0f} MB, from a checkpoint"
    peaks = [
        Measurement(
            workload=workload,
            setting=setting,
            subject=f"peak RSS of rank {rank}",
            unit="MB",
            rounds=(figure.peak_rss_bytes / 1e6,),
            # What torch and torchrec take by themselves is more than a fifth of a small table.
            target=round(PEAK_TARGET_RATIO * table_bytes / 1e6) if whole else None,
        )
        for rank, figure in enumerate(figures)
    ]
    shares = [
        Measurement(
            workload=workload,
            setting=setting,
            subject=f"peak RSS of rank {rank} by the rows it writes",
            unit="x",
            rounds=(figure.peak_rss_bytes * RANKS / table_bytes,),
        )
        for rank, figure in enumerate(figures)
    ]
    return [
        Measurement(
            workload=workload,
            setting=setting,
            subject="time, every answer checked",
            unit="s",
            rounds=(max(figure.seconds for figure in figures),),
        ),
        *peaks,
        *shares,
        Measurement(
            workload=workload,
            setting=setting,
            subject="bytes written",
            unit="MB",
            rounds=(sum(figure.written_bytes for figure in figures) / 1e6,),
            target=round(WRITTEN_TARGET_RATIO * table_bytes / 1e6) if whole else None,
        ),
    ]


def describe() -> str:
    """State what these measurements hold fixed, for the foot of the table."""
    return (
        f"export: a row-wise EmbeddingCollection saved by {RANKS} ranks, exported by {RANKS} ranks from the meta device over "
        "gloo, one thread each; time without imports, from a checkpoint that has just been written; peak RSS of the whole "
        f"process, which may be {PEAK_TARGET_RATIO} of the largest table; a rank writes 1/{RANKS} of it"
    )
