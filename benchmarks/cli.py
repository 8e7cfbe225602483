"""Owns ``kjtserve bench``: which workloads run, the progress shown and where the figures go. Must not measure."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

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

    So far: remap of raw ids on a managed-collision map, TorchRec's against a shard's. The large map needs about 4 GB of
    memory and 2.2 GB of temporary files.
    """
    console = Console(stderr=True)
    try:
        from benchmarks import remap
        from benchmarks.report import as_document, render
    except ModuleNotFoundError as exc:
        console.print(f"bench: {exc.name} is not installed; install kjtserve's export and cpu extras", soft_wrap=True)
        raise typer.Exit(1) from exc
    sizes = QUICK_MAP_SIZES if quick else MAP_SIZES
    comparisons = []
    with Progress(console=console) as progress:
        for num_ids in sizes:
            task = progress.add_task(f"remap, {num_ids // 10**6} M ids", total=remap.num_steps(rounds))
            comparisons += remap.run(num_ids, rounds=rounds, advance=partial(progress.advance, task))
    output = Console()
    output.print(render(comparisons, caption=f"{rounds} rounds. {remap.describe()}."))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(
            json.dumps(as_document(comparisons, notes=[remap.describe()]), indent=2) + "\n", encoding="utf-8"
        )
