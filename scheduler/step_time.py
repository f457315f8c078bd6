"""A linear model of step time, fitted online to measured steps."""

import math
from typing import NamedTuple


class StepLoad(NamedTuple):
    """The features that determine the duration of a step."""

    prefill_tokens: int
    decodes: int
    """Number of rows with one token."""
    context_tokens: int
    """Sum over the rows of the tokens that the last token of the row attends to: K/V that is read."""


class StepCosts(NamedTuple):
    """Seconds per unit of each feature: step time = base + the sum of cost times feature."""

    base_s: float
    prefill_token_s: float
    decode_s: float
    context_token_s: float

    def predict(self, load: StepLoad) -> float:
        """Return the predicted duration of a step in seconds."""
        return (
            self.base_s
            + self.prefill_token_s * load.prefill_tokens
            + self.decode_s * load.decodes
            + self.context_token_s * load.context_tokens
        )


_UNITS = (1.0, 256.0, 16.0, 4096.0)
"""Typical size of each feature, which brings the equations to one scale."""
_SIZE = len(_UNITS)
_PULL = 1e-3
"""Weight of the previous costs relative to the data. Directions that recent steps do not determine (only decodes,
always the same batch size) keep their value instead of drifting."""
_MIN_SPREAD = 0.02
_OUTLIER = 3.0
"""Residuals beyond this many times their mean size lose weight (Huber loss)."""
_SPREAD_RATE = 0.05
_BIAS_RATE = 0.1
_SHIFTED = 0.8
"""A mean signed error beyond this fraction of the spread is not noise: the speed of the machine has changed."""
_SHIFTED_FORGETTING = 0.93
_MIN_STEP_S = 1e-7


class StepTimeModel:
    """Recursive least squares with exponential forgetting, in information form, on relative errors.

    The model keeps the weighted normal equations (4 × 4) and solves them after each step under the constraint that no
    cost is negative. A single slow step changes it little; it follows a lasting change within tens of steps.
    """

    def __init__(self, *, forgetting: float = 0.99, min_samples: int = 8) -> None:
        self._forgetting = forgetting
        self._min_samples = min_samples
        self._num_samples = 0
        self._spread = 0.1
        """Running mean of the absolute relative error."""
        self._bias = 0.0
        """Running mean of the signed relative error, outliers down-weighted."""
        self._matrix = [[0.0] * _SIZE for _ in range(_SIZE)]
        self._vector = [0.0] * _SIZE
        self._scaled = [0.0] * _SIZE
        """Costs per unit of each feature."""

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def costs(self) -> StepCosts | None:
        """The fitted costs; None until `min_samples` steps were measured."""
        if self._num_samples < self._min_samples:
            return None
        return StepCosts(*(cost / unit for cost, unit in zip(self._scaled, _UNITS, strict=True)))

    def observe(self, load: StepLoad, step_time_s: float) -> None:
        """Learn from one measured step; a time that is not finite or not positive is ignored."""
        if not (math.isfinite(step_time_s) and step_time_s > 0.0):
            return
        features = (
            1.0,
            load.prefill_tokens / _UNITS[1],
            load.decodes / _UNITS[2],
            load.context_tokens / _UNITS[3],
        )
        expected_s = sum(value * cost for value, cost in zip(features, self._scaled, strict=True))
        scale_s, weight = self._judge(step_time_s, expected_s)
        self._absorb([value / scale_s for value in features], step_time_s / scale_s, weight)
        self._num_samples += 1
        self._scaled = _solve_non_negative(self._matrix, self._vector, self._scaled)

    def _judge(self, step_time_s: float, expected_s: float) -> tuple[float, float]:
        """Return the scale of the relative error and the weight of this sample; update spread and bias."""
        if self._num_samples < self._min_samples or expected_s < _MIN_STEP_S:
            return max(step_time_s, _MIN_STEP_S), 1.0
        signed = step_time_s / expected_s - 1.0
        error = abs(signed)
        usual = _OUTLIER * self._spread
        weight = 1.0 if error <= usual else usual / error
        self._bias += _BIAS_RATE * (signed * weight - self._bias)
        self._spread += _SPREAD_RATE * (min(error, (1.0 + _OUTLIER) * self._spread) - self._spread)
        self._spread = max(self._spread, _MIN_SPREAD)
        return expected_s, weight

    def _absorb(self, features: list[float], target: float, weight: float) -> None:
        has_shifted = abs(self._bias) > _SHIFTED * self._spread
        keep = min(self._forgetting, _SHIFTED_FORGETTING) if has_shifted else self._forgetting
        for i, value in enumerate(features):
            weighted = weight * value
            self._matrix[i] = [
                keep * old + weighted * other for old, other in zip(self._matrix[i], features, strict=True)
            ]
            self._vector[i] = keep * self._vector[i] + weighted * target


def _solve_non_negative(matrix: list[list[float]], vector: list[float], previous: list[float]) -> list[float]:
    """Minimize ½c'Mc - v'c + ½p|c - previous|² over c >= 0.

    While the solution has negative costs, the most negative one is fixed at 0 and the others are solved for again.
    """
    pull = _PULL * sum(matrix[i][i] for i in range(_SIZE)) / _SIZE
    active = list(range(_SIZE))
    while active:
        rows = [[matrix[i][j] + (pull if i == j else 0.0) for j in active] for i in active]
        right = [vector[i] + pull * previous[i] for i in active]
        solution = _solve(rows, right)
        worst = min(range(len(active)), key=solution.__getitem__)
        if solution[worst] >= 0.0:
            costs = [0.0] * _SIZE
            for i, value in zip(active, solution, strict=True):
                costs[i] = value
            return costs
        del active[worst]
    return [0.0] * _SIZE


def _solve(rows: list[list[float]], right: list[float]) -> list[float]:
    """Solve by Gaussian elimination, overwriting both arguments; a positive definite matrix needs no pivot search."""
    size = len(right)
    for pivot in range(size):
        top = rows[pivot]
        for below in range(pivot + 1, size):
            row = rows[below]
            factor = row[pivot] / top[pivot]
            for column in range(pivot + 1, size):
                row[column] -= factor * top[column]
            right[below] -= factor * right[pivot]
    for pivot in range(size - 1, -1, -1):
        row = rows[pivot]
        known = sum(row[column] * right[column] for column in range(pivot + 1, size))
        right[pivot] = (right[pivot] - known) / row[pivot]
    return right
