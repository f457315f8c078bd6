"""`python -m kernels.tools.aot [ARCH …]`: the resources of every kernel on each architecture, as JSON lines.

With `--limits` the same figures with headroom, in the form of the tests' limit table; `--limits TABLE` keeps what is
larger in TABLE, which another version of the compiler wrote.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import type_canonicalisation_dict

from kernels.ops.gpu.interpreter import compiling
from kernels.ops.gpu.jit import Launch, record_launches
from kernels.tools.aot_cases import CASES, AotCase

ARCHITECTURES = (80, 90, 100)

_RESOURCES = re.compile(r"REG:(?P<reg>\d+)\s+STACK:(?P<stack>\d+)\s+SHARED:\d+\s+LOCAL:(?P<local>\d+)")
_DIVISIBLE = [["tt.divisibility", 16]]

_MAX_REGISTERS = 255

Limits = dict[str, dict[str, dict[str, int]]]
"""case/kernel -> architecture -> field of Resources -> largest value"""


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one compiled kernel on one architecture."""

    kernel: str
    arch: int
    registers: int
    """per thread"""
    shared_bytes: int
    """per program, dynamic"""
    spill_bytes: int
    """per thread: stack and local memory"""
    num_warps: int

    @property
    def threads(self) -> int:
        return self.num_warps * 32


def record(call: Callable[[], object]) -> list[Launch]:
    """The launches that `call` makes on meta tensors."""
    with record_launches() as launches:
        call()
    return launches


def compile_launch(launch: Launch, arch: int) -> Resources:
    """Compile for sm_`arch` exactly what the launch would run there. Raises what the compiler raises."""
    function = launch.kernel.compiled
    signature, constants, attributes = _specialize(function, launch.arguments)
    source = ASTSource(function, signature, constants, attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    with compiling():
        binary: Any = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spill_bytes = _resource_usage(binary.asm["cubin"])
    shared_bytes = int(binary.metadata.shared)
    # Warp specialization may add warps to those asked for.
    num_warps = int(getattr(binary.metadata, "num_warps", launch.num_warps))
    return Resources(launch.kernel.name, arch, registers, shared_bytes, spill_bytes, num_warps)


def _specialize(
    function: Any, arguments: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """What Triton's own launcher derives from the arguments: types, constants, divisibility by 16."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for position, parameter in enumerate(function.params):
        name, value = parameter.name, arguments.get(parameter.name, parameter.default)
        is_specialized = not parameter.do_not_specialize
        is_one = is_specialized and type(value) is int and value == 1
        if parameter.is_constexpr or value is None or is_one:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + type_canonicalisation_dict[str(value.dtype).removeprefix("torch.")]
            if is_specialized:
                attributes[(position,)] = _DIVISIBLE
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if is_specialized and value % 16 == 0:
                attributes[(position,)] = _DIVISIBLE
        else:
            signature[name] = "fp32"
    return signature, constants, attributes


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of stack and local memory per thread) as cuobjdump reports them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = _RESOURCES.search(report)
    if found is None:
        raise RuntimeError(f"cuobjdump reported no resource usage: {report[:200]!r}")
    return int(found["reg"]), int(found["stack"]) + int(found["local"])


def case_resources(case: AotCase, arch: int) -> list[Resources]:
    """One entry for each kernel that the case launches."""
    return [compile_launch(launch, arch) for launch in record(case.call)]


def with_headroom(found: Resources) -> dict[str, int]:
    """Headroom for another compiler version's choices, but not for a larger tile. Spills get none."""
    return {
        "registers": min(_MAX_REGISTERS, -(-(found.registers + 16) // 8) * 8),
        "shared_bytes": -(-(found.shared_bytes + 2048) // 1024) * 1024,
        "spill_bytes": found.spill_bytes,
    }


def main(arguments: list[str]) -> None:
    """Compile everything; about half a second for each kernel and architecture."""
    options = [argument for argument in arguments if not argument.isdigit()]
    architectures = [int(argument) for argument in arguments if argument.isdigit()] or list(ARCHITECTURES)
    limits: Limits = {}
    for case in CASES:
        for arch in (arch for arch in architectures if arch >= case.min_arch):
            for found in case_resources(case, arch):
                if options:
                    limits.setdefault(f"{case.name}/{found.kernel}", {})[str(arch)] = with_headroom(found)
                else:
                    print(json.dumps({"case": case.name} | asdict(found)), flush=True)
    if options:
        _print_limits(
            raised(limits, json.loads(Path(options[1]).read_text())) if len(options) > 1 else limits
        )


def raised(limits: Limits, by: Limits) -> Limits:
    """The larger figure wherever both tables have one, so that the result holds for two compilers."""
    return {
        name: {
            arch: {
                field: max(value, by.get(name, {}).get(arch, {}).get(field, 0))
                for field, value in limit.items()
            }
            for arch, limit in by_arch.items()
        }
        for name, by_arch in limits.items()
    }


def _print_limits(limits: Limits) -> None:
    """Print one kernel per line, so that tables are easy to compare."""
    lines = (f"  {json.dumps(name)}: {json.dumps(limits[name])}" for name in limits)
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main(sys.argv[1:])
