"""The table of a bench's runs, and how far runs of the same thing lie apart."""

from collections.abc import Mapping, Sequence
from typing import Any

from service.cli.console import note, print_table

DISTURBED_SPREAD = 0.1
"""From here on the machine was busy with something else, and ratios of its figures say little."""

_COLUMNS = (
    "run", "requests", "prompt tok/s", "output tok/s", "total s", "steps", "slot use", "TTFT p50 ms", "p99",
    "TPOT p50 ms", "p99",
)  # fmt: skip


def show(report: Mapping[str, Any]) -> None:
    """`runs` of the report as a table, under its `workload` and `slots`."""
    rows = [_row(name, each) for name, each in report["runs"].items()]
    print_table(_COLUMNS, rows, title=f"{report['workload']}, {report['slots']} slots", right=True)
    failed = sum(each.get("failed", 0) for each in report["runs"].values())
    if failed:
        note(f"{failed} requests failed")


def _row(name: str, each: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        name, each["requests"], f"{each['prompt_tokens_per_s']:.1f}", f"{each['output_tokens_per_s']:.1f}",
        f"{each['total_s']:.2f}", each.get("steps", "–"),
        f"{each['slot_use']:.1%}" if "slot_use" in each else "–",
        *(_milliseconds(each[what][share]) for what in ("ttft_s", "tpot_s") for share in ("p50", "p99")),
    )  # fmt: skip


def spread(rates: Sequence[float]) -> float:
    """How much the fastest of runs of the same thing exceeds the slowest, as a share."""
    return round(max(rates) / min(rates) - 1, 4)


def note_spread(what: str, rates: Sequence[float]) -> None:
    """Says so when a run was disturbed."""
    apart = spread(rates)
    if apart >= DISTURBED_SPREAD:
        listed = ", ".join(f"{rate:.1f}" for rate in rates)
        note(f"{what} gave {listed} tok/s in the same run: the machine was disturbed, run it again")


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value * 1000:.1f}"
