"""The figures of a bench: its table, percentiles, and the spread between runs of the same thing."""

from collections.abc import Mapping, Sequence
from typing import Any

from service.cli.console import note, print_table

DISTURBED_SPREAD = 0.1
"""From this spread on the machine was busy with something else, and ratios of its figures say little."""

_COLUMNS = (
    "run", "requests", "prompt tok/s", "output tok/s", "total s", "steps", "slot use", "TTFT p50 ms", "p99",
    "TPOT p50 ms", "p99",
)  # fmt: skip


def show(report: Mapping[str, Any]) -> None:
    """Print the report's `runs` as a table, titled with its `workload` and `slots`."""
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
    """Return by what share the fastest of runs of the same thing exceeds the slowest."""
    return round(max(rates) / min(rates) - 1, 4)


def note_spread(what: str, rates: Sequence[float]) -> None:
    """Print a note when the runs differ so much that something disturbed them."""
    apart = spread(rates)
    if apart >= DISTURBED_SPREAD:
        listed = ", ".join(f"{rate:.1f}" for rate in rates)
        note(f"{what} gave {listed} tok/s in the same run: the machine was disturbed, run it again")


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value * 1000:.1f}"


def percentile(values: Sequence[float], share: float) -> float | None:
    """Interpolate linearly between neighbours; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """Return the percentiles that benches report, by name."""
    return {f"p{round(share * 100)}": _rounded(percentile(values, share)) for share in (0.5, 0.9, 0.99)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
