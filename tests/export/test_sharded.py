"""Live sharded modules and their checkpoints, exported by 1, 2 and 4 real ranks under torchrun and gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from export.contract import INT64_MAX, NO_ROW, SENTINEL_IDS, Kind, Remap, Routing, as_unsigned, read_manifest, versions
from tests.export.ranks import MAPPED, ROWS, weight_of
from tests.export.reader import bucket_of, row_bytes, served

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[1, 2, 4])
def exported(request, tmp_path_factory):
    """(world size, folder) of what the ranks left behind."""
    world, folder = request.param, tmp_path_factory.mktemp(f"ranks{request.param}")
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"),
            *("-m", "tests.export.ranks", str(folder)),
        ],
        cwd=PROJECT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    notes = [json.loads(path.read_text()) for path in sorted(folder.glob("notes*.json"))]
    assert len(notes) == world, done.stderr[-4000:]
    return world, folder, notes


def row_of(table, row):
    numbers = weight_of(table, {**ROWS, **MAPPED}[table])
    return (bytes(4 * numbers.shape[1]) if row == NO_ROW else row_bytes(numbers[row])), row


def test_each_rank_writes_its_own_shard_and_rows_are_the_trained_ones(exported):
    world, folder, _ = exported
    manifest = read_manifest(folder / "repo", "plain", 1)
    assert manifest.num_shards == world
    routings = {table.name: table.routing for table in manifest.tables}
    assert routings == {
        "cut": Routing.ROWS,
        "whole": Routing.TABLE,
        "wide": Routing.COLUMNS,
        "copied": Routing.REPLICATED,
    }
    assert manifest.table("whole").placements[0].shard == world - 1
    ids = {table: [*range(-2, rows + 2), INT64_MAX] for table, rows in ROWS.items()}
    answers = served(folder / "repo", manifest, ids)
    for table, rows in ROWS.items():
        wanted = [row if 0 <= row < rows else NO_ROW for row in ids[table]]
        assert answers[table] == [(*row_of(table, row), row != NO_ROW) for row in wanted]


@pytest.mark.parametrize("name", ["managed", "fresh", "copied"])
def test_every_id_gets_the_row_of_the_rank_that_trained_it(exported, name):
    """Live with ``training`` routing, as a delta on maps that were empty, and from the checkpoint by ``hash`` over 3 shards
    by a team, module on meta.
    """
    world, folder, _ = exported
    manifest = read_manifest(folder / "repo", name, 2 if name == "fresh" else 1)
    assert manifest.kind is (Kind.DELTA if name == "fresh" else Kind.BASE)
    assert manifest.num_shards == (3 if name == "copied" else world)
    states = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world)]
    ids, wanted = {}, {}
    for table in MAPPED:
        entry = manifest.table(table)
        assert (entry.remap, entry.routing) == (Remap.MCH, Routing.HASH if name == "copied" else Routing.TRAINING)
        assert entry.training.buckets == world
        known = {}
        for state in states:
            pairs = zip(
                state[table]["_mch_sorted_raw_ids"].tolist(),
                state[table]["_mch_remapped_ids_mapping"].tolist(),
                strict=True,
            )
            known |= {id_: row for id_, row in pairs if id_ not in SENTINEL_IDS}
        assert entry.zch.occupied == len(known)
        assert any(id_ < 0 for id_ in known)
        ids[table] = [*known, *SENTINEL_IDS, 0, 1, 5, 10**9, -(2**63), 2**62, 2**62 - 1, 2**61, -7]
        defaults = [entry.training.row_edges[bucket_of(entry, id_) + 1] - 1 for id_ in ids[table]]
        wanted[table] = [
            (*row_of(table, known.get(id_, default)), id_ in known)
            for id_, default in zip(ids[table], defaults, strict=True)
        ]
    assert served(folder / "repo", manifest, ids) == wanted


def test_a_bucket_of_training_is_the_rank_that_fbgemm_sends_an_id_to(exported):
    world, folder, _ = exported
    entry = read_manifest(folder / "repo", "managed", 1).table("user")
    block = -(-entry.training.input_hash_size // world)
    for id_ in (0, block - 1, block, -1, -(2**63), INT64_MAX):
        number = as_unsigned(id_)
        assert bucket_of(entry, id_) == (number // block if number < block * world else number % world)


def test_a_rank_that_fails_leaves_no_version_behind_and_is_named_everywhere(exported):
    world, folder, notes = exported
    assert versions(folder / "repo", "failed") == []
    assert not list(folder.glob("repo/failed_shard_*"))
    assert not list(folder.glob("repo/failed/.staging*"))
    assert all("evict()" in note["evicted"] for note in notes)
    assert all(note["evicted"].startswith(f"rank {world - 1}: ") for note in notes[:-1])
    assert all("int8 takes its scale from whole rows" in note["int8"] for note in notes)
    assert all("EmbeddingCollection is not sharded" in note["unsharded"] for note in notes)
    assert all("evicted 'reset': is for managed-collision tables" in note["plain"] for note in notes)
    assert all("call export_sharded on every rank" in note["sharded"] for note in notes)


def test_ranks_that_are_not_parts_of_one_module_are_refused(exported):
    world, _, notes = exported
    if world > 1:
        halves = f"rank 0: its tables are sharded over {world // 2} of the {world} ranks, as with DMPCollection, which is not "
        assert {note["halves"] for note in notes} == {halves + "served live; export a checkpoint"}
        plans = (
            "table whole: rank 1's sharding plan says 9 x 8 at [0, 0] on rank 1, rank 0's 9 x 8 at [0, 0] on rank 0; "
        )
        assert {note["plans"] for note in notes} == {
            plans + "all ranks need one plan, as the planner's collective_plan gives"
        }


def test_the_others_hear_of_a_rank_that_dies(exported):
    world, _, notes = exported
    if world > 1:
        late = "another rank ended before the export was done, or was more than 4 hours late"
        assert all(note["died"].startswith(late) for note in notes[:-1])


def test_a_rank_may_be_later_than_the_trainers_own_timeout(exported):
    _, _, notes = exported
    assert all(note["late"] == "nothing was refused" for note in notes)


def test_an_export_leaves_no_file_open_and_no_thread_running(exported):
    _, _, notes = exported
    assert all(held == note["held"][0] for note in notes for held in note["held"])


def test_the_next_version_may_store_rows_another_way(exported):
    _, folder, _ = exported
    manifest = read_manifest(folder / "repo", "managed", 2)
    assert {entry.max_error > 0 for shard in manifest.shards for entry in shard.tables} == {True}
