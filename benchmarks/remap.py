"""Owns the remap workload: raw id → row on a large managed-collision map, TorchRec's way and the shard's.

The module is a real one and goes through the exporter, so what is timed is the program and the memory-mapped state
that a shard has. Must not time anything itself (``benchmarks.rounds``).

Shape suffixes: N ids of a call, K ids in the map.
"""

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import _mch_remap
from torchrec.sparse.jagged_tensor import JaggedTensor

from benchmarks.report import Comparison
from benchmarks.rounds import Spent, alternate, await_quiet
from benchmarks.shapes import FEATURE, SEED, TABLE, build_full_map, map_of, weight_of
from export.contract import RowDtype, Unknown
from export.mapped import MappedFile, map_safetensors
from export.placement import place_tables
from export.plans import Plan
from export.progress import Progress, silent
from export.reading import read_collection
from export.shard_state import build_state
from export.state import PlacedTable, write_state
from export.trace import load_exported, trace_shard

IDS_PER_CALL = 65_536
CALLS_PER_ROUND = 8
KNOWN_SHARE = 0.9
DIM = 16
"""Keeps 20 M rows, held twice, within memory; a wider row makes the gather, not the remap, dearer."""
REMAP_TARGET = 0.2
"""Of the cost of an id: on every CPU that works on it, and in time where both sides have one thread."""
TARGET_MAP_SIZE = 20_000_000
"""Maps from this size on have to reach the target."""

Rows = tuple[torch.Tensor, torch.Tensor | None]
"""Row numbers INT64 [N]; embeddings FP32 [N, D] where the contender gathers them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Workbench:
    """Both sides of the comparison, ready to be asked: ids INT64 [N] → ``Rows``."""

    ids: torch.Tensor
    """INT64 [K]: the ids of the map, ascending."""
    mch_remap: Callable[[torch.Tensor], Rows]
    """``torchrec.modules.mc_modules._mch_remap``."""
    mch_remap_gather: Callable[[torch.Tensor], Rows]
    """The same, then the rows from the module's weight."""
    hash_remap: Callable[[torch.Tensor], Rows]
    """The shard program's remap, operator by operator, on the shard's state."""
    shard_program: Callable[[torch.Tensor], Rows]
    """The exported program, whole: remap and gather."""


def build_workbench(num_ids: int, folder: Path) -> Workbench:
    """Build the module, export its state as one shard into ``folder``, and set up both sides."""
    module = build_full_map(num_ids, dim=DIM)
    source = read_collection(module)
    (table,) = source.tables
    routing, placements = place_tables(source, Plan(shards=1))[table.name]
    placed = PlacedTable(source=table, routing=routing, placements=placements, unknown=Unknown.TRAINING)
    path = folder / f"remap_{num_ids}.safetensors"
    state = build_state(0, 1, [placed], dim=DIM, row_dtype=RowDtype.FP32)
    write_state(path, state, silent)
    program = trace_shard(state.kind)
    return _set_up(module, load_exported(program.exported), map_safetensors(MappedFile(path), program.state_names))


def _set_up(module: ManagedCollisionEmbeddingCollection, program: nn.Module, state: list[torch.Tensor]) -> Workbench:
    collision = module._managed_collision_collection._managed_collision_modules[TABLE]
    ids_K, mapping = collision._mch_sorted_raw_ids, collision._mch_remapped_ids_mapping
    default_row = collision.output_size() - 1
    weight = weight_of(module)
    hash_table, hash_table_offsets, row_ids, unknown_rows, *_ = state

    def mch_remap(ids_N: torch.Tensor) -> Rows:
        features = {FEATURE: JaggedTensor(values=ids_N, lengths=torch.tensor([ids_N.numel()]))}
        return _mch_remap(features, ids_K, mapping, default_row)[FEATURE].values(), None

    def mch_remap_gather(ids_N: torch.Tensor) -> Rows:
        rows_N, _ = mch_remap(ids_N)
        return rows_N, torch.index_select(weight, 0, rows_N)

    def hash_remap(ids_N: torch.Tensor) -> Rows:
        offsets = torch.tensor([0, ids_N.numel(), ids_N.numel()])
        found_N = torch.ops.fbgemm.pruned_hashmap_lookup(ids_N, offsets, hash_table, hash_table_offsets)
        return torch.index_select(row_ids, 0, torch.where(found_N >= 0, found_N, unknown_rows[0])), None

    def shard_program(ids_N: torch.Tensor) -> Rows:
        embeddings_ND, rows_N, _, _ = program(ids_N, torch.tensor([ids_N.numel()]), state)
        return rows_N, embeddings_ND

    return Workbench(
        ids=map_of(module)[0],
        mch_remap=mch_remap,
        mch_remap_gather=mch_remap_gather,
        hash_remap=hash_remap,
        shard_program=shard_program,
    )


def draw_calls(ids: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Draw a round's calls, INT64 [N] each: nine known ids to one unknown, uniform over the map, in random order."""
    generator = torch.Generator().manual_seed(seed)
    calls = []
    for _ in range(CALLS_PER_ROUND):
        known = torch.randint(0, ids.numel(), (IDS_PER_CALL,), generator=generator)
        # 64 random bits: the chance that one of them is in the map is below one in 10^11
        others = torch.randint(-(2**63), 2**63 - 1, (IDS_PER_CALL,), generator=generator)
        pick = torch.rand(IDS_PER_CALL, generator=generator) < KNOWN_SHARE
        calls.append(torch.where(pick, ids[known], others))
    return calls


def _same(left: Rows, right: Rows) -> bool:
    rows_equal = torch.equal(left[0], right[0])
    return rows_equal and (left[1] is None or right[1] is None or torch.equal(left[1], right[1]))


def thread_counts() -> tuple[int, ...]:
    """Threads that a call may use: one, then all.

    One thread shows what an id costs a core, which decides how much a machine serves: a shard's instances share the
    cores. All threads show the time of a lone call on an idle machine; ``searchsorted`` uses them, the hash lookup is
    serial.
    """
    return tuple(sorted({1, torch.get_num_threads()}))


def num_steps(rounds: int) -> int:
    """Steps that ``run`` tells of: the set-up, then every round."""
    return 1 + len(thread_counts()) * (rounds + 1)


def run(num_ids: int, *, rounds: int, on_progress: Progress = silent) -> list[Comparison]:
    """Compare remap, then remap and gather, on a map of ``num_ids`` ids, for each of ``thread_counts``.

    Args:
        num_ids: Ids in the map; 20 M need about 4 GB of memory and 2.2 GB of temporary files.
        rounds: Counted rounds.
        on_progress: Told (step, done, of how many) before and after the set-up and after each round.

    Raises:
        WrongAnswerError: The two sides do not agree on a row.
    """
    comparisons = []
    available = torch.get_num_threads()
    steps, total = itertools.count(), num_steps(rounds)

    def advance() -> None:
        on_progress(f"remap, {num_ids / 1e6:g} M ids", next(steps), total)

    advance()
    with tempfile.TemporaryDirectory(prefix="kjtserve-bench-") as folder, torch.inference_mode():
        bench = build_workbench(num_ids, Path(folder))
        advance()
        for threads in thread_counts():
            torch.set_num_threads(threads)
            try:
                comparisons += _compare(bench, threads=threads, rounds=rounds, advance=advance)
            finally:
                torch.set_num_threads(available)
    return comparisons


def _compare(bench: Workbench, *, threads: int, rounds: int, advance: Callable[[], None]) -> list[Comparison]:
    spent = alternate(
        {
            "_mch_remap": bench.mch_remap,
            "hash lookup": bench.hash_remap,
            "_mch_remap + index_select": bench.mch_remap_gather,
            "shard.pt2": bench.shard_program,
        },
        lambda round_number: draw_calls(bench.ids, SEED + round_number),
        rounds=rounds,
        same=_same,
        advance=advance,
        settle=await_quiet,
    )
    setting = f"{bench.ids.numel() / 1e6:g} M ids, {threads} thread{'s' * (threads > 1)}"
    target = REMAP_TARGET if bench.ids.numel() >= TARGET_MAP_SIZE else None
    return [
        Comparison(
            workload=workload,
            setting=setting,
            baseline=f"TorchRec {baseline}",
            contender=contender,
            unit=f"ns/id {clock}",
            baseline_rounds=_per_id(spent[baseline], clock),
            contender_rounds=_per_id(spent[contender], clock),
            target=target if threads == 1 else None,
        )
        for workload, baseline, contender, target in (
            ("remap", "_mch_remap", "hash lookup", target),
            ("remap + gather", "_mch_remap + index_select", "shard.pt2", None),
        )
        for clock in ("wall", "CPU")
    ]


def _per_id(rounds: list[Spent], clock: str) -> tuple[float, ...]:
    """Nanoseconds for an id, of each round."""
    ids_per_round = CALLS_PER_ROUND * IDS_PER_CALL
    return tuple((spent.wall_s if clock == "wall" else spent.cpu_s) * 1e9 / ids_per_round for spent in rounds)


def describe() -> str:
    """State what every comparison of this workload holds fixed, for the foot of the table."""
    return (
        f"remap: a full map of uniformly random ids, {IDS_PER_CALL:,} ids a call, {KNOWN_SHARE:.0%} known and drawn "
        f"uniformly, new ids every round, {CALLS_PER_ROUND} calls a round, D={DIM}, state memory-mapped"
    )


def explain() -> str:
    """Say why some of the figures have no verdict."""
    return (
        "cost per id is judged on one thread: on several, searchsorted spreads a lone call over idle cores while the hash "
        "lookup takes one, and CPU time holds OpenMP's spinning; a server under load has no idle core"
    )
