"""The sizes that keep this code readable. An exception is listed by name, with its reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 70
MAX_PARAMETERS = 7

COMPILED = ("kernels/ops/", "kernels/models/cpu/fused_step.py", "kernels/models/cpu/fused_attention.py")
"""What Numba and Triton compile takes addresses, strides and sizes one by one: there are no objects to put them in."""
COMMANDS = ("service/cli/app.py", "service/cli/bench_commands.py")
"""Here a parameter is an option of a command."""

LONGER_FUNCTIONS = {
    "kernels/ops/paged_attention/cpu.py:attend": "one compiled loop over heads and spans",
    "kernels/ops/paged_attention/gpu_decode.py:_decode_kernel": "one Triton kernel",
    "kernels/ops/paged_attention/gpu_prefill.py:_prefill_kernel": "one Triton kernel",
    "kernels/ops/sampling/gpu_kernel.py:_sample_kernel": "one Triton kernel",
    "kernels/ops/store_kv/gpu.py:_store_kv_kernel": "one Triton kernel",
}
MORE_PARAMETERS = {
    "service/cli/summarize.py:summarize": "the body of the command, option by option",
}


def sources() -> Iterator[Path]:
    for package in ("scheduler", "kernels", "service"):
        yield from (ROOT / package).rglob("*.py")


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.name}", node


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_files_are_one_thing_each() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_fit_on_a_screen() -> None:
    found = {name for name, node in functions() if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES}
    assert found == LONGER_FUNCTIONS.keys()


def test_parameters_can_be_remembered() -> None:
    found = {
        name
        for name, node in functions()
        if num_parameters(node) > MAX_PARAMETERS and not name.startswith(COMPILED + COMMANDS)
    }
    assert found == MORE_PARAMETERS.keys()
