"""What plan.yaml may say, and how a mistake in it is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from examples.modules import SampleConfig, build_managed
from export import export_collection
from export.contract import Routing, read_manifest
from export.errors import ExportError
from export.plans import Plan, TablePlan, make_plan, read_plan

PROJECT = Path(__file__).parents[2]


def write(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


def test_the_plan_that_the_documentation_shows_is_read_as_it_says(tmp_path):
    import export.plans

    plan = read_plan(write(tmp_path, export.plans.__doc__.split("::\n")[1].split("\n\nA table")[0]))
    assert (plan.shards, plan.devices) == (3, ("cpu", "cuda:0", "cuda:1"))
    assert {name: table.chosen_routing for name, table in plan.tables.items()} == {
        "user": Routing.HASH,
        "session": Routing.TRAINING,
        "item": Routing.TABLE,
        "category": Routing.ROWS,
        "city": Routing.ROWS,
        "brand": Routing.COLUMNS,
        "country": Routing.REPLICATED,
    }
    assert plan.tables["category"].rows == (4, 3, 3)
    assert plan.tables["city"].rows == ((2, 6), (0, 5))
    assert plan.tables["brand"].columns == ((1, 16), (0, 8), (1, 8))


def test_the_plans_in_the_readme_fit_the_modules_beside_them(tmp_path, monkeypatch):
    readme = (PROJECT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (factory,), (call,) = ([block for block in blocks if word in block] for word in ("def build", "export_collection"))
    names: dict[str, Any] = {}
    exec(factory, names)
    monkeypatch.chdir(tmp_path)
    exec(call, names)
    assert read_manifest(tmp_path / "repo", "clicks", 1).num_shards == 4
    modules = (names["build"](), build_managed(SampleConfig()))
    plans = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    seen = set()
    for module, plan in zip(modules, plans, strict=True):
        manifest = export_collection(module, "repo", name="planned", plan=write(tmp_path, plan))
        assert {table.name for table in manifest.tables} == set(read_plan(tmp_path / "plan.yaml").tables)
        seen |= {table.routing for table in manifest.tables}
    assert seen == set(Routing)
    (devices,) = re.findall(r"^# (devices: .*)$", plans[0], re.MULTILINE)
    assert len(read_plan(write(tmp_path, plans[0] + devices)).devices) == 3


@pytest.mark.parametrize(
    ("devices", "where"),
    [("", ()), ("devices: cuda:1", ("cuda:1", "cuda:1")), ("devices: [cuda:0, cpu]", ("cuda:0", "cpu"))],
)
def test_devices_are_one_for_all_shards_or_one_for_each(tmp_path, devices, where):
    plan = read_plan(write(tmp_path, f"shards: 2\n{devices}"))
    assert plan.devices == where


SIZES = r"write a size for each shard, \[4, 3, 3\], or \[shard, size\] in order"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shards: true", "shards: True: use a whole number"),
        ("shards: '2'", "shards: '2': use a whole number"),
        ("shards: 2\ntables: {user: {shard: true}}", "tables.user.shard: True: use a whole number"),
        ("shards: 0", "shards: .*greater than or equal to 1"),
        ("shards: 2.0", r"shards: 2\.0: use a whole number"),
        ("tables: {}", "shards: missing; write how many there are, shards: 2"),
        ("[1, 2]", "plan: .*"),
        ("shards: [", "not YAML"),
        ("shards: 2\nshard: 3", "shard: Extra inputs"),
        ("shards: 2\ndevices: [cpu]", "plan: devices names 1, there are 2 shards"),
        ("shards: 2\ndevices: cuda", "devices.0: 'cuda': use cpu or cuda:N"),
        ("shards: 2\ndevices: cuda:99999999999999999999", "devices.0: 'cuda:9+': use cpu or cuda:N, N from 0 to 9999"),
        ("shards: 2\ndevices: [cpu, cuda:01]", "devices.1: 'cuda:01': use cpu or cuda:N"),
        ("shards: 2\ndevices: [cpu, gpu:0]", "devices.1: 'gpu:0': use cpu or cuda:N"),
        ("shards: 2\ntables: {user: {routing: table}}", "tables.user: routing 'table' needs 'shard'"),
        ("shards: 2\ntables: {user: {routing: columns}}", "tables.user: routing 'columns' needs 'columns'"),
        ("shards: 2\ntables: {user: {shard: -1}}", "tables.user.shard: "),
        (
            "shards: 2\ntables: {user: {routing: hash, rows: [1, 2]}}",
            "tables.user: 'rows' belongs to routing 'rows' or 'training', not 'hash'",
        ),
        (
            "shards: 2\ntables: {user: {routing: rows, shard: 1}}",
            "tables.user: 'shard' belongs to routing 'table', not 'rows'",
        ),
        (
            "shards: 2\ntables: {user: {columns: [2, 2], shards: all}}",
            "tables.user: 'shards' belongs to routing 'replicated', not 'columns'",
        ),
        (
            "shards: 2\ntables: {user: {routing: random}}",
            "tables.user.routing: .*'table', 'rows', 'columns', 'replicated', 'training' or 'hash'",
        ),
        ("shards: 2\ntables: {user: {rows: [-1, 11]}}", rf"tables.user.rows: \[-1, 11\]: {SIZES}"),
        ("shards: 2\ntables: {user: {rows: [4, [1, 6]]}}", rf"tables.user.rows: .*: {SIZES}"),
        ("shards: 2\ntables: {user: {rows: []}}", rf"tables.user.rows: \[\]: {SIZES}"),
        ("shards: 2\ntables: {user: {rows: 10}}", f"tables.user.rows: 10: {SIZES}"),
        ("shards: 2\ntables: {user: {rows: [true, 9]}}", f"tables.user.rows: .*: {SIZES}"),
        ("shards: 2\ntables: {user: {columns: [[0, 2, 2]]}}", f"tables.user.columns: .*: {SIZES}"),
        ("shards: 2\ntables: {user: {columns: [1.5, 2.5]}}", f"tables.user.columns: .*: {SIZES}"),
        ("shards: 2\ntables: {user: {shards: some}}", "tables.user.shards.*'all'"),
        ("shards: 2\ntables: {user: {column: [1]}}", "tables.user.column: Extra inputs"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused_naming_the_field(tmp_path, text, message):
    with pytest.raises(ExportError, match=message) as raised:
        read_plan(write(tmp_path, text))
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"plan {tmp_path}")


def test_a_plan_that_is_not_there_is_refused_with_its_path(tmp_path):
    with pytest.raises(ExportError, match=r"nowhere\.yaml: No such file"):
        read_plan(tmp_path / "nowhere.yaml")


def test_a_plan_that_is_no_text_is_refused_with_its_path(tmp_path):
    (tmp_path / "plan.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ExportError, match=r"plan\.yaml: not UTF-8 text"):
        read_plan(tmp_path / "plan.yaml")


def test_a_plan_is_the_same_made_in_python_or_read():
    assert make_plan({"shards": 2, "tables": {"user": {"rows": [[1, 4], [0, 6]]}}}) == Plan(
        shards=2, tables={"user": TablePlan(rows=((1, 4), (0, 6)))}
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "shards: 2\ntables:\n  user: {shard: 0}\n  user: {shard: 1}\n",
            "key 'user' is given twice; keep one .* line 4",
        ),
        ("shards: 2\nshards: 3\n", "key 'shards' is given twice; keep one .* line 2"),
        ("shards: &few 2\n", "anchor or alias 'few'; write the value out .* line 1"),
        ("a: [0]\nb: *few\n", "anchor or alias 'few'; write the value out .* line 2"),
        ("shards: 2024-13-45", "month must be in 1..12"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_a_plan_says_each_thing_once(tmp_path, text, message):
    with pytest.raises(ExportError, match=f"not YAML as a plan has it: {message}"):
        read_plan(write(tmp_path, text))


def test_a_plan_of_few_aliases_and_billions_of_values_is_refused_at_once(tmp_path):
    lines = ["a0: &a0 [1]", *(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]" for at in range(1, 12))]
    with pytest.raises(ExportError, match="anchor or alias 'a0'"):
        read_plan(write(tmp_path, "\n".join(lines)))
