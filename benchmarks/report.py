"""Owns the shape of a result and how it is shown: a table for people, JSON for scripts. Must not measure anything."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from statistics import median

from rich.table import Table

PACKAGES = ("kjtserve", "torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec", "nvidia-pytriton")


@dataclass(kw_only=True, slots=True, frozen=True)
class Comparison:
    """One contender against one baseline on one setting of a workload, measured in the same rounds."""

    workload: str
    setting: str
    """What sets this comparison apart from its neighbours, in words."""
    baseline: str
    contender: str
    unit: str
    """What both numbers count, e.g. ``ns/id wall``; smaller is better."""
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


@dataclass(kw_only=True, slots=True, frozen=True)
class Measurement:
    """One figure of the stack that nothing stands beside."""

    workload: str
    setting: str
    subject: str
    """What was measured."""
    unit: str
    """What the number counts; smaller is better."""
    rounds: tuple[float, ...]
    """Of each round, in ``unit``."""
    target: float | None = None
    """What has to be reached, at most, in ``unit``; None: there is no target."""

    @property
    def value(self) -> float:
        """Median over the rounds."""
        return median(self.rounds)

    @property
    def met(self) -> bool | None:
        """Whether the value is within the target; None without one."""
        return None if self.target is None else self.value <= self.target


def render(comparisons: Sequence[Comparison], measurements: Sequence[Measurement] = (), *, caption: str) -> Table:
    """Lay the results out for a terminal: medians, ratios, targets; the caption says what was held fixed.

    Comparisons that differ in their unit only, one after the other, share a row.
    """
    table = Table(title="medians over rounds, both sides in turn in the same run", caption=caption, show_lines=True)
    table.add_column("workload", overflow="fold")
    table.add_column("unit", no_wrap=True)
    for heading in ("baseline", "contender", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    for name, group in groupby(comparisons, key=_name):
        rows = list(group)
        table.add_row(
            name,
            "\n".join(row.unit for row in rows),
            "\n".join(f"{median(row.baseline_rounds):.1f}" for row in rows),
            "\n".join(f"{median(row.contender_rounds):.1f}" for row in rows),
            "\n".join(f"{row.ratio:.3f}" for row in rows),
            "\n".join("" if row.target is None else f"≤ {row.target:.2f} {_verdict(row.met)}" for row in rows),
        )
    for figure in measurements:
        target = "" if figure.target is None else f"≤ {figure.target:g} {_verdict(figure.met)}"
        name = f"{figure.workload}: {figure.setting}\n{figure.subject}"
        table.add_row(name, figure.unit, "", f"{figure.value:.1f}", "", target)
    return table


def _name(row: Comparison) -> str:
    return f"{row.workload}: {row.setting}\n{row.contender} against {row.baseline}"


def _verdict(met: bool | None) -> str:
    return "met" if met else "MISSED"


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


def as_document(
    comparisons: Sequence[Comparison], measurements: Sequence[Measurement] = (), *, notes: Sequence[str]
) -> dict[str, object]:
    """Everything measured, for JSON: every round beside the medians, and what was held fixed."""
    return {
        "notes": list(notes),
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
        "measurements": [asdict(row) | {"value": row.value, "met": row.met} for row in measurements],
    }
