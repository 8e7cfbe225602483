"""Distributed checkpoints and state dicts as a source; what is damaged, hostile or not there is refused by name."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from export import export_collection, verify_version
from export.checkpoint import Checkpoint, Chunk, find_name, open_state, read_whole
from export.contract import INT64_MAX, versions
from export.errors import ExportError
from export.restoring import restore_collection
from tests.export.reader import expected, served
from tests.modules import (
    FALLBACKS,
    hash_zch_collection,
    managed_collection,
    map_of,
    plain_collection,
    untrained_collection,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


def save(module, folder, prefix=""):
    state = {prefix + name: value for name, value in module.state_dict().items()}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("prefix", ["", "model.sparse."])
@pytest.mark.parametrize("source", ["checkpoint", "state dict"])
def test_a_module_on_the_meta_device_gives_the_configs_and_the_checkpoint_the_numbers(tmp_path, prefix, source):
    module = managed_collection()
    state = {prefix + name: value for name, value in module.state_dict().items()}
    checkpoint = save(module, tmp_path / "ck", prefix) if source == "checkpoint" else state
    on_meta = untrained_collection(device="meta")
    manifest = export_collection(on_meta, tmp_path / "repo", name="c", num_shards=2, checkpoint=checkpoint)
    ids = {table: [*map_of(module, table), -1, INT64_MAX, 5, -7] for table in ("user", "item")}
    answers = served(tmp_path / "repo", manifest, ids)
    assert all(answers[table] == expected(module, table, ids[table]) for table in ids)
    assert verify_version(tmp_path / "repo", "c", on_meta, checkpoint=checkpoint).ids > 0


def test_strides_and_half_precision_survive(tmp_path):
    table = torch.randn(6, 4).half()
    dcp.save({"a": table.t(), "b": torch.arange(5)}, checkpoint_id=tmp_path, no_dist=True)
    state = Checkpoint(tmp_path)
    assert torch.equal(read_whole(state, "a"), table.t())
    assert torch.equal(read_whole(state, "b"), torch.arange(5))


def refuse(checkpoint, tmp_path, message, module=None):
    with pytest.raises(ExportError, match=message) as raised:
        export_collection(module or plain_collection(), tmp_path / "repo", name="c", checkpoint=checkpoint)
    assert "\n" not in str(raised.value)
    assert versions(tmp_path / "repo", "c") == []


def test_what_is_not_there_is_named(tmp_path):
    refuse(tmp_path / "nowhere", tmp_path, r"nowhere/\.metadata: No such file")
    refuse(
        save(plain_collection({"other": 3}), tmp_path / "ck"), tmp_path, r"holds no embeddings\.user\.weight; it has"
    )
    refuse(
        save(plain_collection({"user": 11}), tmp_path / "c2"),
        tmp_path,
        r"user\.weight: shape \(11, 4\), the module says",
    )
    two = {"a.embeddings.user.weight": torch.zeros(10, 4), "b.embeddings.user.weight": torch.zeros(10, 4)}
    refuse(two, tmp_path, r"\['a\.embeddings\.user\.weight', 'b\.embeddings\.user\.weight'\] all end in")
    whole = {"embeddings.user.weight": torch.zeros(10, 4, dtype=torch.int8)}
    refuse(
        whole, tmp_path, r"state dict: embeddings\.user\.weight: its rows are a Tensor of torch\.int8; only floating"
    )


@pytest.mark.parametrize(
    ("on_meta", "message"),
    [
        ("user.weight", r"embeddings\.user\.weight: its rows are on the meta device; pass the checkpoint they are in"),
        (
            "user._mch_sorted_raw_ids",
            r"user\._mch_sorted_raw_ids: is on the meta device, without numbers; pass the trained",
        ),
    ],
)
def test_a_state_dict_on_the_meta_device_is_refused(tmp_path, on_meta, message):
    module = managed_collection()
    state = module.state_dict()
    (name,) = [name for name in state if name.endswith(on_meta)]
    state[name] = state[name].to("meta")
    refuse(state, tmp_path, message, module)


def test_rows_of_a_tensor_subclass_are_refused_in_a_state_dict_as_in_a_module(tmp_path):
    class Odd(torch.Tensor):
        pass

    state = {name: value.as_subclass(Odd) for name, value in plain_collection().state_dict().items()}
    refuse(state, tmp_path, r"state dict: embeddings\.user\.weight: its rows are a Odd of torch\.float32")


@pytest.mark.parametrize("checkpoint", [7, [1], b"ck"])
def test_what_is_no_checkpoint_is_refused(tmp_path, checkpoint):
    refuse(
        checkpoint, tmp_path, r"checkpoint .*: use the path of a torch\.distributed\.checkpoint directory, or a state"
    )


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning", "ignore:torch.quantize_per_tensor:UserWarning"
)
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (lambda weight: weight.to_sparse(), r"is a torch\.sparse_coo tensor; pass a dense one of plain numbers"),
        (lambda weight: torch.nested.nested_tensor([weight, weight[:3]]), "is a nested tensor; pass a dense one .*"),
        (lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.quint8), "is a quantised tensor; pass .*"),
        (lambda weight: weight.numpy(), r"is a ndarray, not a tensor; pass a torch\.Tensor"),
    ],
)
def test_an_entry_of_a_state_dict_that_is_no_dense_tensor_is_refused(tmp_path, entry, message):
    weight = plain_collection().embeddings["user"].weight.detach()
    refuse({"embeddings.user.weight": entry(weight)}, tmp_path, rf"^state dict: embeddings\.user\.weight: {message}$")


def test_a_state_dict_whose_name_is_no_string_is_refused(tmp_path):
    refuse({1: torch.zeros(10, 4)}, tmp_path, r"^state dict: name 1 is no string; pass module\.state_dict\(\)$")


def test_entries_of_a_state_dict_that_nobody_asks_for_may_be_anything(tmp_path):
    module = plain_collection()
    state = module.state_dict() | {"_extra_state": 1, "optimiser.step": torch.zeros(2).to_sparse(), "log": [1.0]}
    assert export_collection(module, tmp_path, name="c", checkpoint=state).version == 1


class Pieces:
    """A state of one tensor [6], in the given chunks."""

    place = "pieces"

    def __init__(self, *pieces):
        self._chunks = [Chunk(offsets=(start,), numbers=numbers) for start, numbers in pieces]

    def names(self):
        return ["t"]

    def shape(self, _):
        return (6,)

    def chunks(self, _):
        return self._chunks


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], r"0 of its numbers are in this process, not all of \(6,\)"),
        ([(0, torch.arange(5))], r"5 of its numbers are in this process, not all of \(6,\)"),
        ([(0, torch.arange(4)), (3, torch.arange(2))], "its chunks overlap and leave a gap; copy the checkpoint again"),
        ([(0, torch.arange(3)), (3, torch.zeros(3))], "its chunks differ in dtype; copy the checkpoint again"),
        ([(0, torch.empty(6, device="meta"))], "is on the meta device, without numbers; pass the trained state"),
    ],
)
def test_chunks_that_do_not_make_one_tensor_are_refused(pieces, message):
    with pytest.raises(ExportError, match=rf"^pieces: t: {message}$"):
        read_whole(Pieces(*pieces), "t")


def test_a_file_that_is_cut_off_or_missing_is_named(tmp_path):
    checkpoint = save(plain_collection(), tmp_path / "ck")
    (file,) = checkpoint.glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    refuse(checkpoint, tmp_path, r"__0_0\.distcp: ")
    file.unlink()
    refuse(checkpoint, tmp_path, r"__0_0\.distcp: .*copy the whole checkpoint directory")


def replace_item(checkpoint, name, value):
    """Let the metadata say that ``value``, as ``torch.save`` stores it, is a tensor's item."""
    torch.save(value, checkpoint / "other.distcp")
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    (index,) = [index for index in metadata.storage_data if index.fqn == name]
    length = (checkpoint / "other.distcp").stat().st_size
    metadata.storage_data[index] = _StorageInfo(relative_path="other.distcp", offset=0, length=length)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    ("item", "message"),
    [
        (lambda weight: {"weight": weight}, "holds a dict, not a dense tensor as torch.save stores one"),
        (torch.Tensor.to_sparse, r"holds a torch\.sparse_coo tensor, not a dense tensor"),
        (lambda weight: torch.complex(weight, weight).conj().imag, "holds a negated or conjugated view, not a dense"),
        (
            lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.quint8),
            r"cannot be read \(NotImplementedError: .*backend\); copy",
        ),
        (lambda _: print, r"cannot be read \(UnpicklingError: Weights only load failed\); copy the checkpoint again$"),
    ],
)
def test_an_item_that_is_no_dense_tensor_is_refused_in_one_line(tmp_path, item, message):
    module = plain_collection()
    checkpoint = save(module, tmp_path / "ck")
    replace_item(checkpoint, "embeddings.user.weight", item(module.embeddings["user"].weight.detach()))
    refuse(checkpoint, tmp_path, rf"^[^\n]*other\.distcp: embeddings\.user\.weight: {message}")


def test_metadata_that_would_run_code_is_refused_before_it_does(tmp_path):
    class Hostile:
        def __reduce__(self):
            return print, ("it ran",)

    checkpoint = save(plain_collection(), tmp_path / "ck")
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Hostile()))
    refuse(checkpoint, tmp_path, r"names builtins\.print, which no checkpoint of tensors needs: refused")
    (checkpoint / ".metadata").write_bytes(b"\x80\x04nonsense")
    refuse(checkpoint, tmp_path, r"\.metadata: cannot be read")


def test_a_file_outside_of_the_checkpoint_is_refused(tmp_path):
    checkpoint = save(plain_collection(), tmp_path / "ck")
    (file,) = checkpoint.glob("*.distcp")
    outside = tmp_path / "outside"
    file.rename(outside)
    file.symlink_to(outside)
    message = (
        rf"ck: the file '{file.name}', which \.metadata names, lies outside of it at {outside}; copy the checkpoint"
    )
    refuse(checkpoint, tmp_path, message)


def test_a_map_of_another_bucket_count_is_refused(tmp_path):
    module = hash_zch_collection()
    state = module.state_dict()
    (name,) = [key for key in state if key.endswith("user._hash_zch_bucket")] or [None]
    assert name is not None
    state[name] = state[name] + 1
    refuse(state, tmp_path, r"table user: its state was saved with \d+ buckets, the module has", module)


@pytest.mark.parametrize("edges", [[], [0, 11], [1, 12], [0, 5, 5, 12], [0, 9, 3, 12]])
def test_segments_that_are_not_those_of_a_map_are_refused(tmp_path, edges):
    state = managed_collection().state_dict()
    (name,) = [key for key in state if key.endswith("user._output_segments_tensor")]
    state[name] = torch.tensor([*edges, -1, -1])
    refuse(
        state,
        tmp_path,
        r"state dict: table user: segments \[.*\] do not rise from 0 to its 12 rows",
        managed_collection(),
    )


def without_bucket_count(module):
    """State as ``persist_hash_zch_bucket=False`` leaves it."""
    return {name: value for name, value in module.state_dict().items() if not name.endswith("_hash_zch_bucket")}


@pytest.mark.parametrize("fallback", sorted(FALLBACKS))
@pytest.mark.parametrize("input_hash_size", [0, 1000])
@pytest.mark.parametrize(("trained", "built"), [(4, 2), (2, 4), (4, 1)])
def test_a_map_of_another_bucket_count_is_refused_by_its_ids_where_the_state_does_not_say(
    tmp_path, trained, built, input_hash_size, fallback
):
    options = {"fallback": fallback, "input_hash_size": input_hash_size}
    state = without_bucket_count(hash_zch_collection({"user": 64}, buckets=trained, **options))
    message = rf"table user: \d+ of \d+ ids are not found where they lie by a module of {built} buckets and max_probe 4"
    refuse(state, tmp_path, message, hash_zch_collection({"user": 64}, buckets=built, **options))


def test_a_map_without_its_bucket_count_is_served_by_a_module_of_its_training(tmp_path, caplog):
    module = hash_zch_collection({"user": 64}, buckets=4)
    build = hash_zch_collection({"user": 64}, buckets=4, seed=3)
    known = map_of(module, "user")
    manifest = export_collection(build, tmp_path, name="c", num_shards=2, checkpoint=without_bucket_count(module))
    answers = served(tmp_path, manifest, {"user": list(known)})["user"]
    assert [(row, hit) for _, row, hit in answers] == [(row, True) for row in known.values()]
    assert "bucket count" not in caplog.text


def test_where_ids_cannot_tell_the_bucket_count_a_warning_says_so(caplog):
    module = hash_zch_collection({"user": 64}, buckets=4, max_probe=16)
    restore_collection(module, module.state_dict())
    assert "bucket count" not in caplog.text
    restore_collection(module, without_bucket_count(module))
    assert "table user: its state does not say its bucket count, and max_probe 16 reaches" in caplog.text


def test_a_name_is_found_behind_any_path_of_modules_but_not_inside_another_word():
    state = open_state({"x.my_embeddings.t.weight": torch.zeros(1), "m.embeddings.t.weight": torch.zeros(1)})
    assert find_name(state, "embeddings.t.weight") == "m.embeddings.t.weight"
    assert find_name(state, "embeddings.u.weight") is None
