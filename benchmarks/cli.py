"""Owns ``kjtserve bench``: which workloads run, the progress shown and where the figures go. Must not measure."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from export.contract import UserError

if TYPE_CHECKING:
    from benchmarks.report import Comparison, Measurement

MAP_SIZES = (1_000_000, 20_000_000)
QUICK_MAP_SIZES = MAP_SIZES[:1]


def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="A small map and a small table only: a minute, 1 GB of memory.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=5, help="Counted rounds; the figures are medians over them.")] = 7,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write every round's figures to PATH as well.")
    ] = None,
) -> None:
    """Measure the stack: against its peers, side by side in one run, and against its own targets.

    So far: remap of raw ids on a managed-collision map, TorchRec's against a shard's; start and memory of a shard;
    export of a 4 GB table by two ranks.

    A whole run needs about 6 GB of memory and 8.6 GB of temporary files.
    """
    # Building a JaggedTensor makes torch log advice about tracing that no user of a command can act on.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        from benchmarks import ranks, remap, start
        from benchmarks.report import as_document, render
        from service.triton_files import check_system
    except ModuleNotFoundError as exc:
        raise UserError(f"bench needs {exc.name}, which is not installed; install kjtserve[export,cpu]") from exc
    check_system(num_models=1)  # now, and not after the minutes before the first start
    with _json_file(json_path) as json_file:
        comparisons, measurements = _measure(quick=quick, rounds=rounds)
        notes = [remap.describe(), remap.explain(), start.describe(), ranks.describe()]
        if json_file is not None:
            json.dump(as_document(comparisons, measurements, notes=notes), json_file, indent=2)
            json_file.write("\n")
    caption = "\n".join(f"{note}." for note in [f"{rounds} rounds, {start.ROUNDS} starts", *notes])
    Console().print(render(comparisons, measurements, caption=caption))


def _measure(*, quick: bool, rounds: int) -> tuple[list["Comparison"], list["Measurement"]]:
    from benchmarks import ranks, remap, start

    comparisons = []
    # Drawn only when a step is told: a thread that draws meanwhile would be charged to what is measured.
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        bars = _Bars(progress)
        try:
            for num_ids in QUICK_MAP_SIZES if quick else MAP_SIZES:
                comparisons += remap.run(num_ids, rounds=rounds, on_progress=bars.tell)
            measurements = start.run(start.QUICK_ROWS if quick else start.ROWS, on_progress=bars.tell)
            measurements += ranks.run(ranks.QUICK_ROWS if quick else ranks.ROWS, on_progress=bars.tell)
        except OSError as exc:
            raise UserError(f"bench: temporary files: {exc}; set TMPDIR to a folder with 9 GB free") from exc
    return comparisons, measurements


class _Bars:
    """A bar for each step, from when it is first told of."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def tell(self, step: str, done: int, total: int) -> None:
        """See ``export.progress.Progress``."""
        if step not in self._tasks:
            self._tasks[step] = self._progress.add_task(step, total=total)
        self._progress.update(self._tasks[step], completed=done, total=total, refresh=True)


@contextmanager
def _json_file(path: Path | None) -> Iterator[TextIO | None]:
    """Open the file before anything is measured, so that a wrong path costs no minute."""
    if path is None:
        yield None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w", encoding="utf-8")
    except OSError as exc:
        raise UserError(f"--json {path}: {exc.strerror}; name a file that can be written") from exc
    with file:
        yield file
