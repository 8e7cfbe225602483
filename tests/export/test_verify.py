"""A version that is damaged, or answers otherwise than the module, does not pass; nor is such a version published."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file
from torchrec.modules.embedding_modules import EmbeddingCollection

import export.assembly
from export import export_collection, verify_version
from export.contract import NO_ROW, RowDtype, read_manifest, version_dir, versions
from export.errors import ExportError
from export.programs import ProgramKind, RemapKind, ShardModule
from export.trace import ShardProgram, _export, _quiet, _script, save_exported, trace_input_hash, trace_shard
from tests.export.forging import forge, forge_state
from tests.modules import configs, managed_collection, map_of, modulo_hash, plain_collection, train


@pytest.fixture
def published(tmp_path):
    module = managed_collection()
    export_collection(module, tmp_path, name="c", num_shards=2)
    return module, version_dir(tmp_path, "c", 1)


def test_a_sound_version_passes_and_is_counted(tmp_path, published):
    report = verify_version(tmp_path, "c", published[0])
    manifest = read_manifest(tmp_path, "c", 1)
    assert (report.collection, report.version, report.files) == ("c", 1, 12)
    assert report.bytes == sum(file.size_bytes for file in manifest.files)
    assert report.ids > 10_000


def test_an_older_version_can_be_verified(tmp_path, published):
    module, _ = published
    train(module, steps=3, seed=5)
    export_collection(module, tmp_path, name="c")
    assert verify_version(tmp_path, "c", module).version == 2
    with pytest.raises(ExportError, match=r"differs from the module|ids in the map"):
        verify_version(tmp_path, "c", module, 1)


@pytest.mark.parametrize("made_with", [False, True])
def test_a_version_that_answers_indices_where_the_module_does_not_is_caught(tmp_path, made_with):
    module, other = (
        EmbeddingCollection(tables=configs({"user": 5}), need_indices=need) for need in (made_with, not made_with)
    )
    other.load_state_dict(module.state_dict())
    export_collection(module, tmp_path, name="c")
    message = f"the version has need_indices {made_with}, the module {not made_with}"
    with pytest.raises(ExportError, match=message):
        verify_version(tmp_path, "c", other)


@pytest.mark.parametrize(
    "path", ["shard_0/state.safetensors", "shard_1/shard.pt2", "shard_0/model.pt", "shard_1/model.py"]
)
def test_a_flipped_byte_is_caught(tmp_path, published, path):
    module, directory = published
    content = bytearray((directory / path).read_bytes())
    content[len(content) // 2] ^= 1
    (directory / path).write_bytes(content)
    with pytest.raises(ExportError, match=f"{path}: its SHA-256 differs"):
        verify_version(tmp_path, "c", module)


@pytest.mark.parametrize("cut", [0, 1, 700])
def test_a_truncated_file_is_caught(tmp_path, published, cut):
    module, directory = published
    path = directory / "shard_1" / "state.safetensors"
    path.write_bytes(path.read_bytes()[: cut - 1 if cut < 2 else cut])
    with pytest.raises(ExportError, match=r"shard_1/state\.safetensors: \d+ bytes, the manifest says"):
        verify_version(tmp_path, "c", module)


def test_a_missing_file_is_caught(tmp_path, published):
    module, directory = published
    (directory / "shard_0" / "model.py").unlink()
    with pytest.raises(ExportError, match=r"shard_0/model\.py: No such file"):
        verify_version(tmp_path, "c", module)


def test_a_link_that_leads_elsewhere_is_caught(tmp_path, published):
    link = tmp_path / "c_shard_1" / "1"
    link.unlink()
    link.symlink_to("../c/1/shard_0")
    with pytest.raises(ExportError, match="c_shard_1/1: does not lead to"):
        verify_version(tmp_path, "c", published[0])


def change_one_bit_of_a_row(state):
    bits = state["rows"].view(torch.int32)
    bits[1, 0] ^= 1


def swap_two_rows_numbers(state):
    state["row_ids"][:2] = state["row_ids"][:2].flip(0)


def forget_an_id(state):
    at = int((state["hash_table"][:, 0] != -1).nonzero()[0])
    state["hash_table"][at] = -1


def learn_an_id(state):
    at = int((state["hash_table"][:, 0] == -1).nonzero()[0])
    state["hash_table"][at] = torch.tensor([123_456, 0])


def send_an_id_to_another_row(state):
    at = int((state["hash_table"][:, 0] != -1).nonzero()[0])
    state["hash_table"][at, 1] ^= 1


def change_the_default_row(state):
    state["unknown_rows"][0] -= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            change_one_bit_of_a_row,
            r"table (user|item): shard 0 \(shard\.pt2\) differs .*row (\d+) hit True, but other numbers",
        ),
        (swap_two_rows_numbers, r"shard 0 \(shard\.pt2\) differs"),
        (forget_an_id, r"its map on shard 0 holds \d+ ids, the manifest says"),
        (learn_an_id, r"its map on shard 0 holds \d+ ids, the manifest says"),
        (send_an_id_to_another_row, r"shard 0 \(shard\.pt2\) differs"),
        (change_the_default_row, r"table user: shard 0 \(shard\.pt2\) differs"),
        (lambda state: state.pop("rows"), "not a state file that holds .*rows"),
    ],
)
def test_a_state_that_was_changed_with_its_checksum_is_caught(tmp_path, published, change, message):
    module, directory = published
    forge_state(directory, 0, change)
    with pytest.raises(ExportError, match=message):
        verify_version(tmp_path, "c", module)


def test_one_changed_row_of_a_large_plain_table_is_caught(tmp_path):
    module = plain_collection({"big": 60_000}, dim=64)
    export_collection(module, tmp_path, name="c", num_shards=2)
    with torch.no_grad():
        module.embeddings["big"].weight[41_234, 63] += 1e-6
    with pytest.raises(ExportError, match=r"table big: shard 1 .* differs from the module in 1 of .*first id 41234"):
        verify_version(tmp_path, "c", module)


def test_the_bar_moves_while_rows_are_checked(tmp_path):
    module = plain_collection({"big": 60_000}, dim=64)
    told = []
    export_collection(module, tmp_path, name="c", num_shards=2, on_progress=lambda *step: told.append(step))
    done = [step[1] for step in told if step[0] == "checking the answers"]
    assert len(set(done)) >= 3
    assert done == sorted(done)
    assert done[-1] == told[-1][2] == 60_000 * 64 * 4


class OffByOneMch(ShardModule):
    def forward(self, ids, lengths, state: list[torch.Tensor]):
        rows, numbers, hits, over = super().forward(ids, lengths, state)
        return rows, torch.where(numbers == 3, 4, numbers), hits, over


class WrongType(ShardModule):
    def forward(self, ids, lengths, state: list[torch.Tensor]):
        found, numbers, hits, over = super().forward(ids, lengths, state)
        return found.double(), numbers, hits, over


class WrongForNoIds(ShardModule):
    """Fails on 0 ids, as a reduction does that has no identity; right for every other number."""

    def forward(self, ids, lengths, state: list[torch.Tensor]):
        found, numbers, hits, over = super().forward(ids, lengths, state)
        return found, numbers, hits & (ids <= ids.max()), over


class SentinelHits(ShardModule):
    def forward(self, ids, lengths, state: list[torch.Tensor]):
        rows, numbers, hits, over = super().forward(ids, lengths, state)
        return rows, numbers, hits | (ids == 2**63 - 1), over


class FixedBatch(ShardModule):
    def forward(self, ids, lengths, state: list[torch.Tensor]):
        return super().forward(ids.reshape(5), lengths, state)


def kind_of(managed):
    remap = RemapKind.MCH if managed else RemapKind.PLAIN
    return ProgramKind(remap=remap, row_dtype=RowDtype.FP32, width=4)


def export_program(program, *, managed):
    from export import trace

    with _quiet():
        return _export(program, trace._examples(kind_of(managed), program.state_names))


@pytest.mark.parametrize(
    ("program", "managed", "message"),
    [
        (OffByOneMch, True, r"\(shard\.pt2\) differs from the module"),
        (SentinelHits, True, r"\(shard\.pt2\) differs .*first id 9223372036854775807"),
        (WrongType, False, r"an answer is torch\.float64"),
        (WrongForNoIds, False, r"shard\.pt2 fails on \[0, 0, 0\] ids"),
        (FixedBatch, False, r"shard\.pt2 fails on"),
    ],
)
def test_a_program_that_answers_wrongly_is_not_published(tmp_path, monkeypatch, program, managed, message):
    sound = trace_shard(kind_of(managed))
    broken = ShardProgram(
        exported=export_program(program(kind_of(managed)), managed=managed),
        torchscript=sound.torchscript,
        state_names=sound.state_names,
    )
    monkeypatch.setattr(export.assembly, "trace_shard", lambda _kind: broken)
    module = managed_collection() if managed else plain_collection()
    with pytest.raises(ExportError, match=message):
        export_collection(module, tmp_path, name="c", num_shards=2)
    assert versions(tmp_path, "c") == []
    assert not list(tmp_path.glob("c_shard_*"))


def test_a_wrong_torchscript_program_is_not_published_either(tmp_path, monkeypatch):
    class ZeroHits(torch.nn.Module):
        def forward(self, ids, lengths, state: list[torch.Tensor]):
            return torch.zeros(ids.shape[0], state[-1].shape[1]), ids, ids >= 0, ids < 0

    sound = trace_shard(kind_of(False))
    with _quiet():
        script = _script(ZeroHits())
    broken = ShardProgram(exported=sound.exported, torchscript=script, state_names=sound.state_names)
    monkeypatch.setattr(export.assembly, "trace_shard", lambda _kind: broken)
    with pytest.raises(ExportError, match=r"\(model\.pt\) differs"):
        export_collection(plain_collection(), tmp_path, name="c")


def test_a_program_swapped_in_later_with_its_checksum_is_caught(tmp_path, published):
    module, directory = published
    forge(directory, "shard_1/shard.pt2", export_program(OffByOneMch(kind_of(True)), managed=True))
    with pytest.raises(ExportError, match=r"shard 1 \(shard\.pt2\) differs"):
        verify_version(tmp_path, "c", module)


def test_a_wrong_input_hash_is_caught(tmp_path):
    module = managed_collection(input_hash=modulo_hash)
    export_collection(module, tmp_path, name="c")
    from export.source import InputHash

    other = save_exported(trace_input_hash(InputHash(function=lambda ids, size: modulo_hash(ids + 1, size), size=1009)))
    forge(version_dir(tmp_path, "c", 1), "input_hash_0.pt2", other)
    with pytest.raises(ExportError, match=r"table (user|item): input_hash_0\.pt2 hashes ids differently"):
        verify_version(tmp_path, "c", module)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (plain_collection, r"holds tables \['user', 'item'\], the module has"),
        (lambda: plain_collection({"user": 12, "item": 20}), "managed collision True, the module False"),
        (lambda: managed_collection({"user": 13, "item": 20}), "table user: the version has rows 12, the module 13"),
        (lambda: managed_collection(dim=3), "table user: the version has dim 4, the module 3"),
        (lambda: managed_collection(features={"user": ["u"]}), "features"),
        (lambda: managed_collection(steps=1, eviction_interval=1, seed=8), "ids in the map|differs"),
    ],
)
def test_another_module_is_told_apart(tmp_path, published, other, message):
    with pytest.raises(ExportError, match=message):
        verify_version(tmp_path, "c", other())


def test_what_is_not_there_is_named(tmp_path, published):
    with pytest.raises(ExportError, match="holds no version of a collection 'd'"):
        verify_version(tmp_path, "d", published[0])
    with pytest.raises(ExportError, match=r"1, 5|published versions: \[1\]"):
        verify_version(tmp_path, "c", published[0], 5)


def test_the_state_file_is_safetensors_with_rows_on_a_cache_line(published):
    module, directory = published
    content = (directory / "shard_0" / "state.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    start, stop = header["rows"]["data_offsets"]
    assert (8 + size + start) % 64 == 0
    assert (8 + size + header["hash_table"]["data_offsets"][0]) % 64 == 0
    assert 8 + size + stop == len(content)
    state = load_file(directory / "shard_0" / "state.safetensors")
    held = {id_ for id_ in state["hash_table"][:, 0].tolist() if id_ != -1}
    assert held <= {*map_of(module, "user"), *map_of(module, "item")}
    assert NO_ROW not in state["row_ids"].tolist()
