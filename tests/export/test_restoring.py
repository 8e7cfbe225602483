"""State of every kind: tensors, sharded ones, checkpoints of them, and evictions that nobody has consumed."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Shard as ShardOf

from export import export_collection, verify_version
from export.errors import ExportError
from export.reading import read_collection
from export.restoring import restore_collection
from tests.export.reader import served
from tests.modules import (
    hash_zch_collection,
    managed_collection,
    map_of,
    plain_collection,
    untrained_collection,
)

TRAINED = plain_collection()


@pytest.fixture(scope="module")
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def two_shards(weight, first=None):
    """A ShardedTensor of two row shards, both on this rank; the first has ``first`` rows, or half of them."""
    first = weight.shape[0] // 2 if first is None else first
    parts = [(0, weight[:first]), (first, weight[first:])]
    shards = [Shard.from_tensor_and_offsets(part.detach().clone(), [start, 0], rank=0) for start, part in parts]
    return init_from_local_shards(shards, *weight.shape)


KINDS = {
    "plain": lambda weight: weight.detach().clone(),
    "ShardedTensor": two_shards,
    "DTensor": lambda weight: distribute_tensor(weight.detach(), init_device_mesh("cpu", (1,)), [ShardOf(0)]),
}


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch's own, of its sharded tensors
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_rows_are_read_from_every_kind_of_state(tmp_path, kind, saved):
    """As a state dict, and from the checkpoint that ``dcp.save`` writes of it."""
    state = {f"model.{name}": KINDS[kind](weight) for name, weight in TRAINED.state_dict().items()}
    if saved:
        dcp.save(state, checkpoint_id=tmp_path / "checkpoint")
    source = restore_collection(plain_collection(seed=9), tmp_path / "checkpoint" if saved else state)
    for table in source.tables:
        weight = TRAINED.embeddings[table.name].weight
        assert torch.equal(table.numbers.read(0, table.rows), weight)
        assert torch.equal(table.numbers.gather(torch.tensor([table.rows - 1, 0])), weight[[-1, 0]])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("where", ["module", "state dict", "checkpoint"])
def test_rows_that_fp32_would_round_are_refused_wherever_they_lie(tmp_path, where):
    module = plain_collection().double()
    state = module.state_dict()
    if where == "checkpoint":
        dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    checkpoint = {"module": None, "state dict": state, "checkpoint": tmp_path / "checkpoint"}[where]
    message = r"^table user: its rows are of torch\.float64, .*convert the module to float32 first$"
    with pytest.raises(ExportError, match=message):
        export_collection(module, tmp_path / "repo", name="c", checkpoint=checkpoint)
    assert not list(tmp_path.glob("repo/c/[0-9]*"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_that_fp32_holds_are_read_exactly(dtype):
    module = plain_collection().to(dtype)
    for source in (read_collection(module), restore_collection(plain_collection(), module.state_dict())):
        for table in source.tables:
            assert torch.equal(table.numbers.read(0, table.rows).to(dtype), module.embeddings[table.name].weight)


@pytest.mark.usefixtures("_one_rank")
def test_a_module_whose_parameters_are_dtensors_is_read_like_another():
    module = plain_collection()
    for embedding in module.embeddings.values():
        embedding.weight = torch.nn.Parameter(KINDS["DTensor"](embedding.weight))
    for table in read_collection(module).tables:
        assert torch.equal(table.numbers.read(0, table.rows), TRAINED.embeddings[table.name].weight)


def refuse_map(changed, message):
    """A module's state with some of the user table's map changed is refused, in a line that says so."""
    module = managed_collection()
    prefix = "_managed_collision_collection._managed_collision_modules.user."
    state = module.state_dict()
    state |= {prefix + name: change(state[prefix + name]) for name, change in changed.items()}
    with pytest.raises(ExportError, match=rf"^state dict: [^\n]*user[^\n]*{message}$"):
        restore_collection(untrained_collection(device="meta"), state)


@pytest.mark.parametrize("edges", [[0, 5, 3, 12], [0, 12, 5, 12], [0, 6, 6, 12], [0, 0, 12], [1, 12], [0, 13], []])
def test_segments_that_do_not_rise_to_the_last_row_are_refused(edges):
    def segments(padded):
        return torch.tensor(edges + [-1] * (padded.numel() - len(edges)))

    refuse_map(
        {"_output_segments_tensor": segments}, r"segments \[.*\] do not rise from 0 to its 12 rows; save it again"
    )


@pytest.mark.parametrize("name", ["_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"])
def test_a_map_of_other_numbers_than_integers_is_refused(name):
    refuse_map({name: torch.Tensor.double}, r"holds torch\.float64; a map is made of INT64: save it again")


@pytest.mark.parametrize("segments", [torch.tensor(12), torch.tensor([0.0, float("nan"), 12.0])])
def test_segments_of_another_dimension_or_dtype_are_refused(segments):
    refuse_map({"_output_segments_tensor": lambda _: segments}, r"segments \[.*\] do not rise .*")


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch's own, of its sharded tensors
def test_chunks_of_mpzch_that_begin_inside_of_a_bucket_are_refused():
    module = hash_zch_collection({"user": 24}, buckets=4)
    state = module.state_dict()
    (name,) = [name for name in state if name.endswith("user._hash_zch_identities")]
    state[name] = two_shards(state[name], first=7)
    message = r"chunks begin inside of buckets, at rows \[7\]; save it in whole buckets$"
    with pytest.raises(ExportError, match=message):
        restore_collection(module, state)


def test_rows_of_unconsumed_evictions_are_zeros_when_asked(tmp_path):
    module = managed_collection()
    collision = module._managed_collision_collection._managed_collision_modules["item"]
    collision._evicted = True
    collision._evicted_emb_indices = torch.tensor([2, 5])
    with pytest.raises(ExportError, match=r"--evicted reset"):
        read_collection(module)
    manifest = export_collection(module, tmp_path, name="c", num_shards=2, evicted="reset")
    ids = [id_ for id_, row in map_of(module, "item").items() if row in {2, 5, 6}]
    answers = served(tmp_path, manifest, {"item": ids})["item"]
    assert sorted((row, numbers == bytes(16)) for numbers, row, _ in answers) == [(2, True), (5, True), (6, False)]
    assert bool(module._embedding_module.embeddings["item"].weight[[2, 5]].all())


@pytest.mark.parametrize(
    ("module", "checkpoint", "message"),
    [
        (
            managed_collection,
            True,
            r"evicted 'reset': a checkpoint does not say which rows evict\(\) would name; leave evicted",
        ),
        (plain_collection, False, "evicted 'reset': is for managed-collision tables; this module's ids are rows"),
    ],
)
def test_evicted_is_refused_where_it_would_do_nothing(tmp_path, module, checkpoint, message):
    module = module()
    options = {"evicted": "reset", "checkpoint": module.state_dict() if checkpoint else None}
    with pytest.raises(ExportError, match=message):
        export_collection(module, tmp_path, name="c", **options)
    export_collection(module, tmp_path, name="c")
    with pytest.raises(ExportError, match=message):
        verify_version(tmp_path, "c", module, **options)
