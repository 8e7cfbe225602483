"""The direction of dependencies: read off every module's imports, wherever in the module they stand."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
PARTS = ("export", "model_repo", "service", "benchmarks", "examples")
CONTRACT = "export.contract"
STDLIB = sys.stdlib_module_names


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def modules_under(folder: str) -> list[Path]:
    paths = sorted((PROJECT / folder).rglob("*.py"))
    assert paths, f"{folder} holds no module: was it renamed?"
    return paths


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def offenders(folder: str, forbidden, *, skip: str | None = None) -> list[str]:
    return [
        f"{path.relative_to(PROJECT)} imports {name}"
        for path in modules_under(folder)
        if skip is None or not path.is_relative_to(PROJECT / skip)
        for name in sorted(imports_of(path))
        if forbidden(name)
    ]


def is_ours_but_contract(name: str, *own: str) -> bool:
    # `import export.contract` binds the parent too; the bare parent is lazy and harmless, its other modules are not.
    ours = any(within(name, part) for part in PARTS)
    return ours and not within(name, CONTRACT) and not any(within(name, part) for part in own)


def test_the_contract_needs_the_standard_library_and_pydantic_only():
    assert not offenders(
        "export/contract",
        lambda name: name.split(".")[0] not in STDLIB | {"pydantic"} and not within(name, CONTRACT),
    )


@pytest.mark.parametrize("part", ["service", "model_repo", "export"])
def test_a_part_knows_itself_and_the_contract_only(part):
    assert not offenders(part, lambda name: is_ours_but_contract(name, part))


@pytest.mark.parametrize("part", ["service", "model_repo"])
def test_only_the_exporter_imports_torchrec(part):
    assert not offenders(part, lambda name: within(name, "torchrec"))


def test_rest_and_grpc_never_import_each_other():
    assert not offenders("service/rest", lambda name: within(name, "service.grpc") or within(name, "grpc"))
    assert not offenders(
        "service/grpc",
        lambda name: any(within(name, web) for web in ("service.rest", "fastapi", "starlette", "uvicorn")),
    )


EDGES_MAY_IMPORT = {
    "admission", "description", "errors", "log", "metrics", "offload", "plane", "settings", "types", "wire",
    "wire_tensors",
}  # fmt: skip


@pytest.mark.parametrize("edge", ["rest", "grpc"])
def test_an_edge_knows_the_plane_and_nothing_behind_it(edge):
    assert not offenders(
        f"service/{edge}",
        lambda name: (
            within(name, "service")
            and not within(name, f"service.{edge}")
            and name.split(".")[1:2]
            and name.split(".")[1] not in EDGES_MAY_IMPORT
        ),
    )


CORE = (
    "admission", "batch", "batcher", "catalog", "dataplane", "dedup", "errors", "fanout", "health", "plane", "routing",
    "types", "validate",
)  # fmt: skip


@pytest.mark.parametrize("module", CORE)
def test_the_core_knows_no_protocol(module):
    names = imports_of(PROJECT / "service" / f"{module}.py")
    foreign = (
        "fastapi",
        "starlette",
        "uvicorn",
        "grpc",
        "tritonclient",
        "service.rest",
        "service.grpc",
        "service.wire",
    )
    assert not [name for name in names if any(within(name, package) for package in foreign)]


def test_nothing_of_the_front_tier_depends_on_its_composition_root():
    roots = ("service.server", "service.listeners", "service.commands", "service.cli")
    inside = {PROJECT / f"{root.replace('.', '/')}.py" for root in roots}
    outside = [path for path in modules_under("service") if path not in inside]
    assert not [
        (path.name, name) for path in outside for name in imports_of(path) if any(within(name, root) for root in roots)
    ]


def test_asking_for_help_or_the_contract_loads_nothing_heavy():
    code = (
        "import sys; import export.contract, service.cli; service.cli.build_app();"
        "heavy = {'torch', 'torchrec', 'fbgemm_gpu', 'fastapi', 'grpc', 'numpy'} & set(sys.modules);"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
