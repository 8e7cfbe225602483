"""The check of a version sees a wrong answer under every routing, remap, row dtype and runtime, on the shard that gives it."""

import itertools

import pytest
import torch

from export import export_collection, verify_version
from export.check import check_version
from export.contract import INT64_MAX, TrainingBuckets, training_bucket, version_dir
from export.errors import ExportError
from export.plans import Plan
from export.reading import read_collection
from export.samples import _block_edges
from tests.export.forging import forge, forge_manifest, forge_state
from tests.modules import hash_zch_collection, plain_collection, untrained_collection

RANKS = 48
RANKS_ROWS = 2 * RANKS
PLANS = {
    "rows": {"rows": [[1, 11], [0, 3], [2, 6]]},
    "columns": {"columns": [[1, 5], [0, 12], [1, 3]]},
    "replicated": {"shards": [0, 1]},
}


def plan_of(routing):
    return Plan(shards=3, tables={"user": PLANS[routing]})


def trained_by_many_ranks():
    """A module and the state of its map as 48 ranks leave it: of two rows each, the first holds an id, the last none."""
    block = -(-INT64_MAX // RANKS)
    ids = [id_ for rank in range(RANKS) for id_ in (rank * block + 7, INT64_MAX)]
    module = untrained_collection({"user": RANKS_ROWS})
    prefix = "_managed_collision_collection._managed_collision_modules.user."
    edges = [*range(0, RANKS_ROWS + 1, 2), -1]
    state = {
        "_embedding_module.embeddings.user.weight": module._embedding_module.embeddings["user"].weight.detach(),
        prefix + "_mch_sorted_raw_ids": torch.tensor(ids),
        prefix + "_mch_remapped_ids_mapping": torch.arange(RANKS_ROWS),
        prefix + "_output_segments_tensor": torch.tensor(edges),
    }
    return module, state


def flip_a_bit(name, at=0):
    def change(state):
        numbers = state[name].view(torch.uint8).view(-1)
        numbers[at] ^= 1

    return change


def swap_pieces(state):
    """The shard's columns are one piece of 5 and one of 3."""
    rows = state["rows"].view(-1, 8)
    state["rows"] = torch.cat([rows[:, 5:], rows[:, :5]], dim=1).view(state["rows"].shape).contiguous()


@pytest.mark.parametrize(
    ("routing", "shard", "change"),
    [
        ("rows", 1, flip_a_bit("rows")),
        ("columns", 0, flip_a_bit("rows")),
        ("columns", 1, swap_pieces),
        ("replicated", 0, flip_a_bit("rows")),
        ("replicated", 1, flip_a_bit("rows")),
    ],
)
def test_a_wrong_number_is_seen_on_the_shard_that_has_it(tmp_path, routing, shard, change):
    module = plain_collection({"user": 20}, dim=20)
    export_collection(module, tmp_path, name="c", plan=plan_of(routing))
    forge_state(version_dir(tmp_path, "c", 1), shard, change)
    with pytest.raises(ExportError, match=rf"table user: shard {shard} \(shard\.pt2\) differs .*but other numbers"):
        verify_version(tmp_path, "c", module)


def forget_an_identity(state):
    at = int((state["identities"][:, 0] != -1).nonzero()[0])
    state["identities"][at] = -1


def trade_an_identity(state):
    at = int((state["identities"][:, 0] != -1).nonzero()[0])
    state["identities"][at] += 1


def send_misses_elsewhere(state):
    state["miss_rows"][0] = 0 if int(state["miss_rows"][0]) < 0 else -1


def shift_a_bucket(state):
    state["bucket_firsts"][0] += 1


@pytest.mark.parametrize(
    ("fallback", "change", "message"),
    [
        ("slot", forget_an_identity, r"its map on shard 0 holds \d+ ids, the manifest says"),
        ("slot", trade_an_identity, r"table user: shard 0 \(shard\.pt2\) differs"),
        ("slot", send_misses_elsewhere, r"table user: shard 0 \(shard\.pt2\) differs"),
        ("none", send_misses_elsewhere, r"table user: shard 0 \(shard\.pt2\) differs"),
        ("slot", shift_a_bucket, r"table user: shard 0 \(shard\.pt2\) differs"),
    ],
)
def test_a_wrong_identity_bucket_or_miss_of_mpzch_is_seen(tmp_path, fallback, change, message):
    module = hash_zch_collection({"user": 24}, buckets=4, fallback=fallback)
    export_collection(module, tmp_path, name="c", num_shards=2)
    forge_state(version_dir(tmp_path, "c", 1), 0, change)
    with pytest.raises(ExportError, match=message):
        verify_version(tmp_path, "c", module)


@pytest.mark.parametrize("routing", ["hash", "training"])
def test_a_wrong_default_row_of_any_one_of_many_training_ranks_is_seen(tmp_path, routing):
    module, state = trained_by_many_ranks()
    plan = Plan(shards=2, tables={"user": {"routing": routing}})
    export_collection(module, tmp_path, name="c", plan=plan, checkpoint=state)
    assert verify_version(tmp_path, "c", module, checkpoint=state).ids > 10_000

    def change(tensors):
        tensors["unknown_rows"][17] -= 1

    forge_state(version_dir(tmp_path, "c", 1), 0, change)
    with pytest.raises(ExportError, match=r"table user: shard 0 .*the module says row 35 hit False"):
        verify_version(tmp_path, "c", module, checkpoint=state)


@pytest.mark.parametrize("input_hash_size", [0, 1000, INT64_MAX])
def test_special_ids_reach_every_bucket(input_hash_size):
    rule = TrainingBuckets(input_hash_size=input_hash_size, row_edges=tuple(range(101)))
    over_range = [id_ for id_ in _block_edges(rule) if not 0 <= id_ < input_hash_size]
    buckets = {training_bucket(id_ % 2**64, input_hash_size=input_hash_size, buckets=100) for id_ in over_range}
    assert buckets == set(range(100))


def spoil_scale(number):
    def change(state):
        state["row_scales"][3, 0] = number

    return change


@pytest.mark.parametrize(
    "change", [spoil_scale(float("nan")), spoil_scale(0.0), flip_a_bit("row_scales", 31), flip_a_bit("rows", 20)]
)
def test_an_int8_row_must_be_within_a_step_of_its_own(tmp_path, change):
    """The shard's bound is the widest row's; every other row is held to its own."""
    module = plain_collection({"user": 10}, dim=6)
    with torch.no_grad():
        module.embeddings["user"].weight[9] *= 1e6
    export_collection(module, tmp_path, name="c", row_dtype="int8")
    forge_state(version_dir(tmp_path, "c", 1), 0, change)
    with pytest.raises(ExportError, match=r"table user: shard 0 \(shard\.pt2\) differs .*but other numbers"):
        verify_version(tmp_path, "c", module)


@pytest.mark.parametrize("row_dtype", ["fp16", "int8"])
def test_a_bound_that_does_not_hold_is_seen(tmp_path, row_dtype):
    module = plain_collection({"user": 10}, dim=6)
    export_collection(module, tmp_path, name="c", row_dtype=row_dtype)

    def change(document):
        document["shards"][0]["tables"][0]["max_error"] *= 0.9

    forge_manifest(version_dir(tmp_path, "c", 1), change)
    with pytest.raises(ExportError, match=r"table user: shard 0 .*but other numbers"):
        verify_version(tmp_path, "c", module)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """A version whose program holds its own state."""
    module, repo = plain_collection({"user": 10}), tmp_path_factory.mktemp("embedded")
    export_collection(module, repo, name="c", runtime="pytorch")
    return module, repo, torch.jit.load(version_dir(repo, "c", 1) / "shard_0" / "model.pt")


def replace_model(repo, program):
    draft = repo / "draft.pt"
    torch.jit.save(program, draft)
    forge(version_dir(repo, "c", 1), "shard_0/model.pt", draft.read_bytes())


def test_a_program_that_holds_its_own_state_is_held_against_the_module_too(embedded):
    module, repo, program = embedded
    rows = program.state[-1]
    flip_a_bit("rows", 4 * 4 * 3)({"rows": rows})
    replace_model(repo, program)
    with pytest.raises(ExportError, match=r"table user: shard 0 \(model\.pt\) differs .*but other numbers"):
        verify_version(repo, "c", module)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchScript's own
def test_a_program_that_fails_in_a_process_of_its_own_is_named(embedded):
    class Picky(torch.nn.Module):
        def forward(self, ids: torch.Tensor, lengths: torch.Tensor, state: torch.Tensor):
            assert lengths.size(0) == 7, "seven tables, please"
            return torch.zeros(ids.size(0), 4), ids, ids >= 0

    module, repo, _ = embedded
    replace_model(repo, torch.jit.script(Picky()))
    with pytest.raises(
        ExportError, match=r"model\.pt: a process with torch and fbgemm_gpu alone cannot run it: .*seven"
    ):
        verify_version(repo, "c", module)


def test_some_shards_are_checked_without_the_rows_of_the_others(tmp_path):
    """As each rank of a team does."""
    module = plain_collection({"user": 20}, dim=20)
    manifest = export_collection(module, tmp_path, name="c", plan=plan_of("rows"))
    directory = version_dir(tmp_path, "c", 1)
    forge_state(directory, 1, flip_a_bit("rows"))
    weight = module.embeddings["user"].weight
    spoiled = plain_collection({"user": 20}, dim=20)
    with torch.no_grad():
        spoiled.embeddings["user"].weight[:11] = weight[:11] + 1.0
    told = []
    ids = check_version(directory, manifest, read_collection(spoiled), lambda *step: told.append(step), shards=[0, 2])
    assert ids > 3_000
    assert told[-1] == ("checking the answers", 20 * 20 * 4, 20 * 20 * 4)
    assert [left[1] <= right[1] for left, right in itertools.pairwise(told)].count(False) == 0
    with pytest.raises(ExportError, match="shard 1 "):
        check_version(directory, manifest, read_collection(module), lambda *_: None, shards=[1, 2])
