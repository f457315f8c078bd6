"""Decision 0013 lists every use of a private part of a library, and the bounds keep to what was tested."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
RECORD = (ROOT / "ops/decisions/0013-private-parts-of-libraries.md").read_text()
ROWS = re.findall(r"^\| `([\w/]+\.py)` \|.*\| `([\w/]+\.py)::(\w+)` \|$", RECORD, re.MULTILINE)
OURS = ("service", "scheduler", "kernels")
PUBLIC_WITH_UNDERSCORE = frozenset({"_replace", "_exit", "_asdict", "_name_"})
"""Documented by namedtuples, `os` and enums."""


def private_names(tree: ast.Module) -> Iterator[str]:
    """Private names that a module reads or sets on what is not its own, or imports from a library."""
    own = {name for node in ast.walk(tree) for name in _defined(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_self(node.value):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in OURS:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        else:
            continue
        yield from (name for name in names if re.match(r"_[a-zA-Z]", name) and name not in own)


def _defined(node: ast.AST) -> list[str]:
    """Names that the module defines or takes from another module of ours."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
        return [alias.name for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
        return [node.attr]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _is_self(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def test_every_module_that_reaches_into_a_library_is_listed() -> None:
    reaching = {
        str(path.relative_to(ROOT))
        for package in OURS
        for path in (ROOT / package).rglob("*.py")
        if set(private_names(ast.parse(path.read_text()))) - PUBLIC_WITH_UNDERSCORE
    }
    assert reaching == {module for module, _, _ in ROWS}


def test_control_an_unlisted_use_is_found() -> None:
    tree = ast.parse("class A:\n    def f(self):\n        return self._consumer._client")
    assert set(private_names(tree)) == {"_client"}


@pytest.mark.parametrize(("file", "test"), sorted({(file, test) for _, file, test in ROWS}))
def test_the_named_tests_exist(file: str, test: str) -> None:
    assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "name", ["aiokafka", "llguidance", "numba", "redis", "torch", "transformers", "triton"]
)
def test_locked_version_is_within_the_bounds(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [each for each in map(Requirement, project["dependencies"]) if each.name == name]
    locked = re.search(rf"^{name}==([^ ;\n]+)", (ROOT / "ops/requirements.lock").read_text(), re.MULTILINE)
    assert locked is not None
    assert wanted.specifier.contains(locked[1])
    assert any(bound.operator == "<" for bound in wanted.specifier)
