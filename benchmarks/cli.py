"""Owns ``kjtserve bench``: which workloads run, the progress shown and where the figures go. Must not measure."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.progress import Progress

from export.contract import UserError

MAP_SIZES = (1_000_000, 20_000_000)
QUICK_MAP_SIZES = MAP_SIZES[:1]


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Only the small map: seconds, and a few hundred MB.")] = False,
    rounds: Annotated[int, typer.Option(min=5, help="Counted rounds; the figures are medians over them.")] = 7,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write every round's figures to PATH as well.")
    ] = None,
) -> None:
    """Measure the stack against its peers, side by side in one run.

    So far: remap of raw ids on a managed-collision map, TorchRec's against a shard's.

    The large map needs about 4 GB of memory and 2.2 GB of temporary files.
    """
    # Building a JaggedTensor makes torch log advice about tracing that no user of a command can act on.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        from benchmarks import remap
        from benchmarks.report import as_document, render
    except ModuleNotFoundError as exc:
        raise UserError(f"bench needs {exc.name}, which is not installed; install kjtserve[export,cpu]") from exc
    sizes = QUICK_MAP_SIZES if quick else MAP_SIZES
    comparisons = []
    with _json_file(json_path) as json_file, Progress(console=Console(stderr=True)) as progress:
        for num_ids in sizes:
            task = progress.add_task(f"remap, {num_ids // 10**6} M ids", total=remap.num_steps(rounds))
            try:
                comparisons += remap.run(num_ids, rounds=rounds, advance=partial(progress.advance, task))
            except OSError as exc:
                raise UserError(f"bench: temporary files: {exc}; set TMPDIR to a folder with 3 GB free") from exc
        if json_file is not None:
            json.dump(as_document(comparisons, notes=[remap.describe()]), json_file, indent=2)
            json_file.write("\n")
    Console().print(render(comparisons, caption=f"{rounds} rounds. {remap.describe()}."))


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
