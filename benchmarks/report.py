"""Owns the shape of a result and how it is shown: a table for people, JSON for scripts. Must not measure anything."""

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median

from rich.table import Table

PACKAGES = ("kjtserve", "torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec")


@dataclass(kw_only=True, slots=True, frozen=True)
class Comparison:
    """One contender against one baseline on one setting of a workload, measured in the same rounds."""

    workload: str
    setting: str
    """What sets this comparison apart from its neighbours, in words."""
    baseline: str
    contender: str
    unit: str
    """What both numbers count, e.g. ``ns/id``; smaller is better."""
    baseline_rounds: tuple[float, ...]
    """Of each round, in ``unit``."""
    contender_rounds: tuple[float, ...]
    """Of the same rounds."""
    target: float | None = None
    """The ratio that has to be reached, at most; None: there is no target."""

    @property
    def ratio(self) -> float:
        """Median over the rounds of contender ÷ baseline."""
        pairs = zip(self.contender_rounds, self.baseline_rounds, strict=True)
        return median(ours / theirs for ours, theirs in pairs)

    @property
    def met(self) -> bool | None:
        """Whether the ratio is within the target; None without one."""
        return None if self.target is None else self.ratio <= self.target


def render(comparisons: list[Comparison], *, caption: str) -> Table:
    """Lay the comparisons out for a terminal: medians, ratio, target; the caption says what was held fixed."""
    table = Table(title="medians over rounds, both sides in turn in the same run", caption=caption, show_lines=True)
    for heading in ("workload", "baseline", "contender"):
        table.add_column(heading, overflow="fold")
    for heading in ("ratio", "target"):
        table.add_column(heading, justify="right")
    for row in comparisons:
        table.add_row(
            f"{row.workload}\n{row.setting}",
            f"{row.baseline}\n{median(row.baseline_rounds):.1f} {row.unit}",
            f"{row.contender}\n{median(row.contender_rounds):.1f} {row.unit}",
            f"{row.ratio:.3f}",
            "" if row.target is None else f"≤ {row.target:.2f}\n{'met' if row.met else 'MISSED'}",
        )
    return table


def machine() -> dict[str, object]:
    """Describe what the figures were taken on, without naming the machine."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"architecture": platform.machine(), "cpus": cpus, "python": platform.python_version(), "packages": versions}


def as_document(comparisons: list[Comparison], *, notes: list[str]) -> dict[str, object]:
    """Everything measured, for JSON: every round of both sides beside the medians, and what was held fixed."""
    return {
        "notes": notes,
        "machine": machine(),
        "comparisons": [
            asdict(row)
            | {
                "baseline_median": median(row.baseline_rounds),
                "contender_median": median(row.contender_rounds),
                "ratio": row.ratio,
                "met": row.met,
            }
            for row in comparisons
        ],
    }
