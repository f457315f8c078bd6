"""The walks of ops/architecture.md hold against the code, and cross no more files than they do today."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = ROOT / "ops" / "architecture.md"

HOP = re.compile(r"^\d+\. `([^`]+)`: ((?:`[^`]+`(?:, )?)+)\. \S.*\.$", re.MULTILINE)
MOST_FILES = {"One job": 50, "One token": 24}
"""Today's counts. Lower them when a walk gets shorter; the aim is 50 and 24."""


def hops(walk: str) -> list[tuple[str, list[str]]]:
    """File and functions of each hop; a line that looks like a hop and is not written like one is an error."""
    section = ARCHITECTURE.read_text().split(f"\n## {walk}\n")[1].split("\n## ")[0]
    found = [(path, re.findall(r"`([^`]+)`", names)) for path, names in HOP.findall(section)]
    assert len(found) == len(re.findall(r"^\d+\.", section, re.MULTILINE))
    return found


@cache
def names_in(path: str) -> frozenset[str]:
    """Classes and functions of a file, methods as `Class.method`."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = (
                item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            names |= {f"{node.name}.{function.name}" for function in functions}
    return frozenset(names)


@pytest.mark.parametrize("walk", MOST_FILES)
def test_every_function_of_a_walk_exists(walk: str) -> None:
    files = {path for path, _ in hops(walk)}
    assert {path for path in files if not (ROOT / path).is_file()} == set()
    missing = [
        f"{path}: {name}" for path, names in hops(walk) for name in names if name not in names_in(path)
    ]
    assert missing == []


@pytest.mark.parametrize("walk", MOST_FILES)
def test_a_walk_crosses_no_more_files(walk: str) -> None:
    assert len({path for path, _ in hops(walk)}) == MOST_FILES[walk], "a shorter walk lowers MOST_FILES"


@pytest.mark.parametrize("walk", MOST_FILES)
def test_hops_are_numbered_without_holes(walk: str) -> None:
    section = ARCHITECTURE.read_text().split(f"\n## {walk}\n")[1].split("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\.", section, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_list_of_files_is_that_of_the_code() -> None:
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['table'](), end='')"
    made = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "ops" / "files-table")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout in ARCHITECTURE.read_text(), "run ops/files-table"
