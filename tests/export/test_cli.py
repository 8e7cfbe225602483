"""The commands: what they print, where, and how they end."""

import json
import re
import signal
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest

from export.contract import read_manifest, versions
from export.publish import publish
from export.report import human_bytes
from service.cli import main

FACTORY = """
from tests.modules import managed_collection, plain_collection, untrained_collection
plain = plain_collection
managed = managed_collection
ready = plain_collection()
number = 3
class inner:
    build = managed_collection
def broken():
    raise KeyError("user")
def not_a_module():
    return 3
"""


@pytest.fixture
def kjtserve(tmp_path, monkeypatch, capsys):
    """Run the command line in a directory that holds a user's own module; gives (exit status, stdout, stderr)."""
    (tmp_path / "training_job.py").write_text(FACTORY)
    (tmp_path / "needs_more.py").write_text("import package_that_nobody_has\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("training_job", "needs_more", "raises"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kjtserve", *map(str, arguments)])
        try:
            main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        return status, *capsys.readouterr()

    return run


def test_export_publishes_and_shows_what_went_where(kjtserve, tmp_path):
    status, out, err = kjtserve("export", "training_job:managed", "--out", "repo", "--name", "clicks", "--shards", 3)
    assert (status, err) == (0, "")
    assert "published clicks version 1" in out
    assert re.search(r"user +│ user +│ hash +│ fp32 +│ +12 │ 0: \d+  1: \d+  2: \d+", out)
    assert re.search(r"clicks_shard_2 +│ cpu +│ +2 │ +[\d.]+ (Ki)?B", out)
    assert read_manifest(tmp_path / "repo", "clicks", 1).num_shards == 3


def test_every_option_reaches_the_export(kjtserve, tmp_path):
    (tmp_path / "plan.yaml").write_text("shards: 2\ntables: {item: {routing: table, shard: 1}}\n")
    status, _, err = kjtserve(
        *("export", "training_job:inner.build", "--out", "repo", "--name", "c"),
        *("--plan", "plan.yaml", "--version", 4, "--unknown", "zero"),
    )
    assert (status, err) == (0, "")
    manifest = read_manifest(tmp_path / "repo", "c", 4)
    assert [table.routing for table in manifest.tables] == ["hash", "table"]
    assert {table.unknown for table in manifest.tables} == {"zero"}
    status, _, err = kjtserve("export", "training_job:ready", "--out", "repo", "--name", "p", "--out-of-range", "zero")
    assert (status, err) == (0, "")
    assert read_manifest(tmp_path / "repo", "p", 1).tables[0].out_of_range == "zero"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("training_job:number",), "training_job:number: neither a torch.nn.Module nor a callable, but int"),
        (("training_job:broken",), "training_job:broken: calling it raised KeyError: 'user'"),
        (("training_job:not_a_module",), "training_job:not_a_module: calling it gave int"),
        (("training_job:nothing",), "training_job:nothing: training_job has no 'nothing'"),
        (("nowhere.at_all:f",), "nowhere.at_all:f: no module 'nowhere'; searched"),
        (("needs_more:f",), "importing needs_more needs 'package_that_nobody_has', which is not installed"),
        (("raises:f",), "importing raises raised ZeroDivisionError"),
        (("training_job:plain", "--unknown", "zero"), "unknown is for managed-collision tables"),
        (("training_job:plain", "--plan", "none.yaml"), "plan none.yaml: No such file"),
    ],
)
def test_a_failure_is_one_line_on_stderr_and_status_1(kjtserve, tmp_path, arguments, message):
    status, out, err = kjtserve("export", *arguments, "--out", "repo", "--name", "c")
    assert (status, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "training_job:plain", "--name", "c"),
        ("export", "training_job", "--out", "repo", "--name", "c"),
        ("export", "training_job:", "--out", "repo", "--name", "c"),
        ("export", "training_job:plain", "--out", "repo", "--name", "c", "--shards", 0),
        ("export", "training_job:plain", "--out", "repo", "--name", "c", "--shards", 2, "--plan", "plan.yaml"),
        ("export", "training_job:plain", "--out", "repo", "--name", "c", "--unknown", "maybe"),
        ("export", "training_job:plain", "--out", "repo", "--name", "1"),
        ("export", "training_job:plain", "--out", "repo", "--name", "c", "--runtime", "onnx"),
        ("verify", "repo"),
        ("verify", "repo", "--against", "training_job"),
        ("inspect", "repo", "--version", "x"),
    ],
)
def test_wrong_usage_is_status_2(kjtserve, arguments):
    status, out, err = kjtserve(*arguments)
    assert (status, out) == (2, "")
    assert "Usage: kjtserve" in err


@pytest.mark.parametrize("command", ["export", "verify", "inspect"])
def test_help_teaches_by_example(kjtserve, command):
    status, out, _ = kjtserve(command, "--help")
    assert status == 0
    assert f"Example: kjtserve {command} " in " ".join(out.split())


@pytest.mark.parametrize(
    ("row_dtype", "how"), [("fp32", "bit by bit"), ("fp16", r"numbers within ±[\d.e-]+"), ("int8", r"numbers within ±")]
)
def test_verify_says_what_it_compared_and_how(kjtserve, row_dtype, how):
    kjtserve("export", "training_job:managed", "--out", "repo", "--name", "clicks", "--row-dtype", row_dtype)
    status, out, err = kjtserve("verify", "repo", "--against", "training_job:managed")
    assert (status, err) == (0, "")
    assert re.search(
        rf"clicks version 1 is whole and answers as training_job:managed does: 6 files .*, [\d,]+ ids compared, {how}",
        out,
    )


def test_verify_fails_on_a_damaged_version(kjtserve, tmp_path):
    kjtserve("export", "training_job:managed", "--out", "repo", "--name", "clicks")
    path = tmp_path / "repo" / "clicks" / "1" / "shard_0" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    status, out, err = kjtserve("verify", "repo", "--against", "training_job:managed", "--version", 1)
    assert (status, out) == (1, "")
    assert re.search(r"state\.safetensors: \d+ bytes, the manifest says \d+", err)


def test_verify_asks_which_collection_is_meant(kjtserve):
    for name in ("a", "b"):
        kjtserve("export", "training_job:ready", "--out", "repo", "--name", name)
    status, _, err = kjtserve("verify", "repo", "--against", "training_job:ready")
    assert (status, err.strip()) == (1, "kjtserve: repo: holds 2 collections ['a', 'b']; say which one with --name")
    assert kjtserve("verify", "repo", "--against", "training_job:ready", "--name", "b")[0] == 0


def test_inspect_shows_tables_shards_occupancy_and_sizes(kjtserve):
    kjtserve("export", "training_job:managed", "--out", "repo", "--name", "clicks", "--shards", 2)
    kjtserve("export", "training_job:ready", "--out", "repo", "--name", "ids")
    status, out, _ = kjtserve("inspect", "repo")
    assert status == 0
    assert re.search(
        r"clicks version 1 \(published: 1\), .*, dim 4, 2 shards, [\d.]+ KiB, runtime python$", out, re.MULTILINE
    )
    assert re.search(r"item +│ item +│ hash +│ fp32 +│ +20 │ 0: \d+  1: \d+", out)
    assert re.search(r"item +│ mch LFU +│ +1 │ +19 │ +95.0% │ +0 ", out)
    assert re.search(r"item +│ item +│ rows +│ fp32 +│ +23 │ 0: 23", out)
    assert "ids_shard_0" in out


def test_inspect_shows_columns_devices_runtime_and_the_bound_on_errors(kjtserve, tmp_path):
    (tmp_path / "plan.yaml").write_text(
        "shards: 2\ntables: {user: {columns: [[1, 1], [0, 2], [1, 1]]}, one: {shards: all}}\n"
    )
    options = ("--plan", "plan.yaml", "--row-dtype", "fp16")
    assert kjtserve("export", "training_job:plain", "--out", "repo", "--name", "ids", *options)[0] == 0
    _, out, _ = kjtserve("inspect", "repo")
    assert re.search(r"user +│ user +│ columns +│ fp16 ±[\d.e-]+ +│ +10 │ 0: 10 \[1:3\]  1: 10 \[0:1, 3:4\]", out)
    assert re.search(r"one +│ one +│ replicated +│ fp16 ±[\d.e-]+ +│ +1 │ 0: 1  1: 1", out)
    assert "mch" not in out


def test_inspect_says_why_the_rows_of_a_managed_table_do_not_add_up(kjtserve):
    why = "has on each shard its share of the rows and a copy of the row for unknown ids"
    kjtserve("export", "training_job:managed", "--out", "repo", "--name", "clicks", "--shards", 3)
    kjtserve("export", "training_job:ready", "--out", "repo", "--name", "ids", "--shards", 3)
    assert why in " ".join(kjtserve("inspect", "repo", "--name", "clicks")[1].split())
    assert why not in " ".join(kjtserve("inspect", "repo", "--name", "ids")[1].split())


def test_inspect_as_json_is_the_manifests(kjtserve, tmp_path):
    for _ in range(2):
        kjtserve("export", "training_job:ready", "--out", "repo", "--name", "ids")
    _, out, _ = kjtserve("inspect", "repo", "--json")
    manifest = read_manifest(tmp_path / "repo", "ids", 2)
    assert json.loads(out) == [manifest.model_dump(mode="json")]
    _, out, _ = kjtserve("inspect", "repo", "--name", "ids", "--version", 1, "--json")
    assert json.loads(out)[0]["version"] == 1


def test_inspect_of_an_empty_or_missing_repository_says_what_to_do(kjtserve, tmp_path):
    (tmp_path / "empty").mkdir()
    status, _, err = kjtserve("inspect", "empty")
    assert status == 1
    assert "--out empty` writes one" in err
    status, _, err = kjtserve("inspect", "missing")
    assert status == 1
    assert "missing: no such directory" in err


SKEW = "shard 0 holds 3.0 MiB of 3.1 MiB of rows, 1.9 times its share; cut its largest table over more shards, or use fewer"


def test_a_skewed_plan_is_warned_about_before_anything_is_written(kjtserve, tmp_path, monkeypatch):
    (tmp_path / "skewed.py").write_text(
        textwrap.dedent("""
            from tests.modules import plain_collection
            def build():
                return plain_collection({"big": 200_000, "small": 3})
        """)
    )
    monkeypatch.setattr("export.building.write_version", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    (tmp_path / "plan.yaml").write_text("shards: 2\ntables: {big: {rows: [195_000, 5_000]}}\n")
    status, _, err = kjtserve("export", "skewed:build", "--out", "repo", "--name", "c", "--plan", "plan.yaml")
    assert status == 1
    assert err.splitlines() == [
        f"warning: {SKEW}",
        "kjtserve: stopped by SIGTERM; published versions are untouched",
    ]


def test_one_process_speaks_for_all_that_torchrun_starts(kjtserve, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert kjtserve("export", "training_job:managed", "--out", "repo", "--name", "clicks") == (0, "", "")
    monkeypatch.setenv("RANK", "0")
    status, out, _ = kjtserve("export", "training_job:managed", "--out", "repo", "--name", "clicks")
    assert status == 0
    assert "published clicks version 2" in out


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (1 << 41, "2,048.0 GiB")]
)
def test_sizes_are_written_for_people(size, text):
    assert human_bytes(size) == text


def test_help_needs_neither_torch_nor_torchrec():
    code = (
        "import sys, export.cli, export.report, export.published\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'torchrec', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sigterm_ends_an_export_with_one_line_and_leaves_nothing(kjtserve, tmp_path, monkeypatch):
    monkeypatch.setattr("export.building.check_loaded", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    status, out, err = kjtserve("export", "training_job:plain", "--out", "repo", "--name", "c")
    assert (status, out, err) == (1, "", "kjtserve: stopped by SIGTERM; published versions are untouched\n")
    assert [path.name for path in (tmp_path / "repo").rglob("*")] == ["c", ".lock"]
    assert signal.getsignal(signal.SIGTERM) == before


STOPPED = "kjtserve: stopped by SIGTERM; published versions are untouched\n"

SWALLOWS = """
import signal
import torch
from tests.modules import managed_collection, plain_collection

def _stopped():
    try:
        signal.raise_signal(signal.SIGTERM)
    except Exception:
        pass

def _hash(ids, size):
    _stopped()
    return torch.remainder(ids, size)

def factory():
    _stopped()
    return plain_collection()

def everything():
    try:
        _stopped()
    except BaseException:
        pass
    return plain_collection()

def traced():
    return managed_collection(input_hash=_hash)
"""


@pytest.mark.parametrize("place", ["factory", "everything", "traced"])
def test_no_handler_of_errors_keeps_sigterm_to_itself(kjtserve, tmp_path, monkeypatch, place):
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    monkeypatch.delitem(sys.modules, "swallows", raising=False)
    status, out, err = kjtserve("export", f"swallows:{place}", "--out", "repo", "--name", "c")
    assert (status, out, err) == (1, "", STOPPED)
    assert not (tmp_path / "repo").exists()


def test_a_sigterm_while_torch_is_loaded_waits_until_it_is(kjtserve, tmp_path, monkeypatch):
    finished = []

    class Collection(ModuleType):
        def __getattr__(self, name):
            signal.raise_signal(signal.SIGTERM)
            finished.append(name)

    monkeypatch.setitem(sys.modules, "export.collection", Collection("export.collection"))
    assert kjtserve("export", "training_job:plain", "--out", "repo", "--name", "c") == (1, "", STOPPED)
    assert "export_collection" in finished


def test_a_sigterm_after_the_rename_says_that_the_version_is_there(kjtserve, tmp_path, monkeypatch):
    def publish_first(*arguments):
        publish(*arguments)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("export.building.publish", publish_first)
    status, out, err = kjtserve("export", "training_job:plain", "--out", "repo", "--name", "c")
    assert (status, out) == (1, "")
    assert err == "kjtserve: stopped after version 1 of 'c' was published, which is whole\n"
    assert versions(tmp_path / "repo", "c") == [1]
