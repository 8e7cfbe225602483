"""Owns what a long command shows on the terminal while it runs: bars and warnings; must not know what is being done."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

from export.progress import Progress


class Rate(ProgressColumn):
    """How fast a step goes, in what it counts (rows, bytes) a second; nothing for steps of one piece."""

    def render(self, task: Task) -> Text:
        """The rate of one bar."""
        if not task.speed or (task.total or 0) <= 1:
            return Text()
        return Text(f"{filesize.decimal(int(task.speed)).removesuffix('bytes').removesuffix('B').rstrip()}/s")


class _Warnings(logging.Handler):
    """The exporter's warnings as lines on stderr, above the bars."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(f"warning: {record.getMessage()}", style="yellow", markup=False, highlight=False)


def is_first() -> bool:
    """Whether this process speaks for all: under torchrun, rank 0."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Bars and warnings on stderr, from one process; no bars where nobody watches."""
    console = Console(stderr=True, soft_wrap=True)
    console.quiet = not is_first()
    log, warnings = logging.getLogger("export"), _Warnings(console)
    log.addHandler(warnings)
    # Importing torchrec gives the root a handler, which would say everything once more.
    propagate, log.propagate = log.propagate, False
    try:
        with _bars(console) as on_progress:
            yield on_progress
    finally:
        log.propagate = propagate
        log.removeHandler(warnings)


@contextmanager
def _bars(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Rate(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True, disable=not sys.stderr.isatty() or console.quiet) as bars:
        tasks: dict[str, TaskID] = {}

        def on_progress(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done, total=total)

        yield on_progress
