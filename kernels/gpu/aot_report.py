"""`python -m kernels.gpu.aot_report [ARCH …]`: what every kernel occupies on each architecture, as JSON lines.

With `--limits` the same figures with headroom, in the form of the tests' limit table; `--limits TABLE` keeps what is
larger in TABLE, which another version of the compiler wrote.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from kernels.gpu.aot import ARCHITECTURES, Resources, compile_launch, record
from kernels.gpu.aot_cases import CASES, AotCase

_MAX_REGISTERS = 255

Limits = dict[str, dict[str, dict[str, int]]]
"""case/kernel -> architecture -> field of Resources -> largest value"""


def case_resources(case: AotCase, arch: int) -> list[Resources]:
    """One entry for each kernel that the case launches."""
    return [compile_launch(launch, arch) for launch in record(case.call)]


def with_headroom(found: Resources) -> dict[str, int]:
    """Room for another compiler version's choices, none for a tile that grew. Spills get none."""
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
    """The larger of both wherever both have a figure: a table that holds for two compilers."""
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
    """One kernel per line, so that a difference between two tables reads well."""
    lines = (f"  {json.dumps(name)}: {json.dumps(limits[name])}" for name in limits)
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main(sys.argv[1:])
