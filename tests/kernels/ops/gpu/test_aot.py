"""Every kernel, compiled for architectures that are not here, stays within limits on its resources.

By default a few cases per architecture; TAILRACE_TEST_AOT=full compiles all (a minute of one core when Triton's
cache is cold). `python -m kernels.tools.aot --limits [TABLE]` prints the table again after an intended change;
this one holds for Triton 3.6 and 3.7.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.ops.paged_attention.gpu import HEAD_DIMS
from kernels.tools.aot import ARCHITECTURES, case_resources, compile_launch, record, with_headroom
from kernels.tools.aot_cases import CASES, AotCase

LIMITS: dict[str, dict[str, dict[str, int]]] = json.loads(
    Path(__file__).with_name("limits.json").read_text(encoding="utf-8")
)
REGISTERS_PER_MULTIPROCESSOR = 65_536
SHARED_BYTES_PER_PROGRAM = {80: 166_912, 90: 232_448, 100: 232_448}
"""What the CUDA programming guide allows one program, by compute capability."""
_BY_DEFAULT = {
    "rms_norm-4096": (90,),
    "rms_norm-2560-branch": (90,),
    "embed_tokens-2560-scaled": (90,),
    "token_counts-128256": (90,),
    "silu_mul-14336": (90,),
    "block_copy": (90,),
    "store_kv-d128-32:8-b16-bfloat16-norm": (90,),
    "attention-d64-9:3-b16-bfloat16": (80,),
    "attention-d128-32:8-b16-bfloat16": (80, 90, 100),
    "attention-d256-4:1-b32-bfloat16-window": (90,),
    "attention-d128-32:8-b16-float8_e4m3fn": (100,),
    "sampling-128256-adjusted": (90,),
}
IS_FULL = os.environ.get("TAILRACE_TEST_AOT") == "full"


def _chosen() -> list[tuple[AotCase, int]]:
    return [
        (case, arch)
        for case in CASES
        for arch in ARCHITECTURES
        if arch >= case.min_arch and (IS_FULL or arch in _BY_DEFAULT.get(case.name, ()))
    ]


@pytest.mark.parametrize(("case", "arch"), _chosen(), ids=lambda value: getattr(value, "name", f"sm_{value}"))
def test_compiled_kernel_stays_within_its_limits(case: AotCase, arch: int) -> None:
    for found in case_resources(case, arch):
        limit = LIMITS[f"{case.name}/{found.kernel}"][str(arch)]
        assert found.registers <= limit["registers"], found
        assert found.shared_bytes <= limit["shared_bytes"], found
        assert found.spill_bytes <= limit["spill_bytes"], found
        assert found.registers * found.threads <= REGISTERS_PER_MULTIPROCESSOR, found
        assert found.shared_bytes <= SHARED_BYTES_PER_PROGRAM[arch], found


def test_the_default_choice_names_real_cases() -> None:
    assert set(_BY_DEFAULT) <= {case.name for case in CASES}


def test_every_case_and_architecture_has_limits() -> None:
    expected = {
        f"{case.name}/{launch.kernel.name}": {str(arch) for arch in ARCHITECTURES if arch >= case.min_arch}
        for case in CASES
        for launch in record(case.call)
    }
    assert {name: set(by_arch) for name, by_arch in LIMITS.items()} == expected


def test_spills_are_nowhere_more_than_a_few_registers() -> None:
    """The table is data that a tool writes: this bounds what may be written into it."""
    for name, by_arch in LIMITS.items():
        for arch, limit in by_arch.items():
            assert limit["spill_bytes"] <= (32 if arch == "80" else 16), (name, arch)
            assert limit["shared_bytes"] <= SHARED_BYTES_PER_PROGRAM[int(arch)], (name, arch)


def test_cases_cover_the_head_sizes_and_block_sizes_that_are_promised() -> None:
    names = [case.name for case in CASES if case.name.startswith("attention")]
    for head_dim in HEAD_DIMS:
        assert any(f"-d{head_dim}-" in name for name in names), head_dim
    for block_size in (16, 32, 64):
        assert any(f"-b{block_size}-" in name for name in names), block_size


def test_control_a_tile_that_spills_is_over_the_limit() -> None:
    """Four warps cannot hold the accumulators of a 128 x 128 tile: the figures must say so."""
    case = next(case for case in CASES if case.name == "attention-d128-32:8-b16-bfloat16")
    launch = next(launch for launch in record(case.call) if launch.kernel.name == "prefill_kernel")
    found = compile_launch(replace(launch, num_warps=4), 90)
    assert found.spill_bytes > LIMITS[f"{case.name}/prefill_kernel"]["90"]["spill_bytes"]
    assert with_headroom(found)["spill_bytes"] == found.spill_bytes
