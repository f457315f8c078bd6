"""Percentiles as benches report them."""

from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear between neighbours; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summary(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{round(share * 100)}": _rounded(percentile(values, share)) for share in (0.5, 0.9, 0.99)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
