"""Loading one shard of a version directory."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from export.contract import Toolchain
from model_repo.errors import ShardLoadError
from model_repo.shard import load_shard
from model_repo.toolchain import check_numpy, check_toolchain, import_fbgemm

MODEL = "clicks_shard_0"


def asked(shard, ids, lengths):
    return shard.lookup(shard.base, ids, lengths)


def test_state_is_mapped_not_read(link):
    shard = load_shard(link, MODEL)
    assert (shard.collection, shard.base.version, shard.shard.index) == ("clicks", 1, 0)
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0] for line in lines if line.endswith(str(link.resolve() / "state.safetensors"))]
    pointer = shard.base.state[2].data_ptr()
    ranges = [tuple(int(edge, 16) for edge in bounds.split("-")) for bounds in mapped]
    assert any(start <= pointer < stop for start, stop in ranges)
    assert shard.base.state[2].shape == (10, 4)


def test_warm_up_covers_every_size_without_changing_the_state(link):
    before = (link / "state.safetensors").read_bytes()
    shard = load_shard(link, MODEL)
    seen = []
    program = shard._program
    shard._program = lambda ids, lengths, state: (
        seen.append((len(ids), lengths.tolist())) or program(ids, lengths, state)
    )
    shard.warm_up()
    assert [size for size, _ in seen] == [0, 1, 64, 2048]
    assert all(sum(lengths) == size for size, lengths in seen)
    assert (link / "state.safetensors").read_bytes() == before


def test_a_program_that_fails_is_refused_at_warm_up(link):
    shard = load_shard(link, MODEL)

    def broken(*_):
        raise RuntimeError("Expected size 7")

    shard._program = broken
    with pytest.raises(ShardLoadError, match=r"fails on 0 ids: Expected size 7"):
        shard.warm_up()


@pytest.mark.parametrize("file", ["state.safetensors", "shard.pt2"])
@pytest.mark.parametrize("damage", ["truncated", "long", "missing"])
def test_a_file_of_the_wrong_size_is_refused(link, file, damage):
    path = link.resolve() / file
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[:-1] if damage == "truncated" else content + b"x")
    with pytest.raises(ShardLoadError, match=f"{file}: .*copy the version directory again"):
        load_shard(link, MODEL)


def test_a_state_file_that_is_no_safetensors_is_refused(link):
    path = link.resolve() / "state.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(ShardLoadError, match="not a safetensors file"):
        load_shard(link, MODEL)


def test_a_state_file_with_other_tensors_is_refused(link, edit_manifest):
    edit_manifest(lambda manifest: manifest["shards"][0].update(state=["known", "row_ids", "weights"]))
    with pytest.raises(ShardLoadError, match=r"holds tensors \['known', 'row_ids', 'rows'\], the manifest says"):
        load_shard(link, MODEL)


def test_a_damaged_program_is_refused_with_both_toolchains_named(link):
    path = link.resolve() / "shard.pt2"
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(ShardLoadError, match=re.escape(f"exported with torch {torch.__version__}")):
        load_shard(link, MODEL)


def test_a_file_that_the_manifest_does_not_list_is_refused(link, edit_manifest):
    edit_manifest(lambda manifest: manifest.update(files=[]))
    with pytest.raises(ShardLoadError, match=r"lists no file shard_0/shard\.pt2"):
        load_shard(link, MODEL)


def test_a_directory_of_another_version_is_refused(link, edit_manifest):
    edit_manifest(lambda manifest: manifest.update(version=3, base=3))
    with pytest.raises(ShardLoadError, match="says clicks version 3, its place says clicks 1"):
        load_shard(link, MODEL)


def test_a_model_that_is_no_shard_of_the_version_is_refused(link):
    with pytest.raises(ShardLoadError, match="no shard of its manifest is model 'clicks_shard_7'"):
        load_shard(link, "clicks_shard_7")


def test_a_shard_directory_of_another_shard_is_refused(link):
    link.resolve().rename(link.resolve().with_name("shard_1"))
    with pytest.raises(ShardLoadError, match="model clicks_shard_0 is shard 0 in the manifest beside it"):
        load_shard(link.resolve().with_name("shard_1"), MODEL)


def test_a_copy_that_lost_its_links_is_refused(tmp_path):
    with pytest.raises(ShardLoadError, match="symbolic link"):
        load_shard(tmp_path, MODEL)


def test_a_version_without_manifest_is_refused(link):
    (link.resolve().parent / "manifest.json").unlink()
    with pytest.raises(ShardLoadError, match=r"manifest\.json: No such file"):
        load_shard(link, MODEL)


def test_numpy_2_is_refused_and_ours_is_not():
    check_numpy(np.__version__)
    with pytest.raises(ShardLoadError, match=r"numpy 2\.1\.0: .*numpy<2"):
        check_numpy("2.1.0")


def test_another_major_toolchain_is_refused_by_name():
    wrote = Toolchain(kjtserve="0.1.0", torch="2.13.0+cpu", fbgemm_gpu="1.8.0", torchrec="1.8.0")
    check_toolchain(wrote, torch="2.14.1", fbgemm_gpu="1.9.0+cpu")
    with pytest.raises(ShardLoadError, match=r"exported with torch 2\.13\.0\+cpu, this process has torch 3\.0\.0"):
        check_toolchain(wrote, torch="3.0.0", fbgemm_gpu="1.8.0")
    with pytest.raises(ShardLoadError, match=r"install fbgemm_gpu 1\.x here"):
        check_toolchain(wrote, torch="2.13.0", fbgemm_gpu="2.0.0")


def test_a_missing_fbgemm_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    with pytest.raises(ShardLoadError, match="install kjtserve with its 'cpu' or 'gpu' extra"):
        import_fbgemm()


def test_a_shard_on_a_gpu_that_is_not_there_is_refused(link, edit_manifest):
    edit_manifest(lambda manifest: manifest["shards"][0].update(device="cuda:63"))
    with pytest.raises(ShardLoadError, match=r"clicks_shard_0: placed on cuda:63, .* export with --device cpu"):
        load_shard(link, MODEL)


@pytest.mark.gpu
def test_a_shard_on_a_gpu_answers_as_on_the_cpu(link, edit_manifest):
    ids, lengths = torch.tensor([104, 7, 100, 2, -1]), torch.tensor([3, 2])
    expected = asked(load_shard(link, MODEL), ids, lengths)
    edit_manifest(lambda manifest: manifest["shards"][0].update(device="cuda:0"))
    shard = load_shard(link, MODEL)
    shard.warm_up()
    answer = asked(shard, ids, lengths)
    assert {tensor.device.type for tensor in shard.base.state} == {"cuda"}
    assert torch.equal(answer.embeddings_ND, expected.embeddings_ND)
    assert torch.equal(answer.row_ids_N, expected.row_ids_N)
    assert torch.equal(answer.hits_N, expected.hits_N)
