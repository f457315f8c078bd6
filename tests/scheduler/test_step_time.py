"""The step-time model: what it learns, and what it does not let itself be told."""

import math
import random

import pytest

from scheduler.step_time import StepCosts, StepLoad, StepTimeModel

TRUE = StepCosts(base_s=0.012, prefill_token_s=0.0009, decode_s=0.0011, context_token_s=0.000_002)


def random_load(rng: random.Random) -> StepLoad:
    decodes = rng.randrange(0, 64)
    return StepLoad(rng.choice([0, 0, rng.randrange(1, 512)]), decodes, decodes * rng.randrange(50, 1000))


def trained(
    costs: StepCosts, *, noise: float = 0.0, num_steps: int = 400, model: StepTimeModel | None = None
) -> StepTimeModel:
    rng = random.Random(5)
    model = model or StepTimeModel()
    for _ in range(num_steps):
        load = random_load(rng)
        model.observe(load, costs.predict(load) * (1.0 + noise * rng.gauss(0.0, 1.0)))
    return model


def costs_of(model: StepTimeModel) -> StepCosts:
    costs = model.costs
    assert costs is not None
    return costs


def worst_error(model: StepTimeModel, costs: StepCosts) -> float:
    """Largest relative error of the prediction over ordinary steps."""
    rng = random.Random(9)
    loads = [random_load(rng) for _ in range(200)]
    return max(abs(costs_of(model).predict(load) / costs.predict(load) - 1.0) for load in loads)


def test_coefficients_are_recovered_from_exact_data() -> None:
    for found, true in zip(costs_of(trained(TRUE)), TRUE, strict=True):
        assert found == pytest.approx(true, rel=0.02)


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 100.0])
def test_any_speed_of_machine_is_learned_equally(scale: float) -> None:
    costs = StepCosts(*(scale * cost for cost in TRUE))
    assert worst_error(trained(costs), costs) < 0.02


def test_predictions_hold_under_noise() -> None:
    assert worst_error(trained(TRUE, noise=0.1), TRUE) < 0.12


def test_nothing_is_said_before_there_are_enough_samples() -> None:
    model = StepTimeModel(min_samples=8)
    for i in range(7):
        assert model.costs is None
        model.observe(StepLoad(0, 1 + i, 100), 0.02)
    model.observe(StepLoad(0, 8, 100), 0.02)
    assert model.costs is not None


def test_a_model_that_saw_one_batch_size_only_predicts_that_size() -> None:
    model = StepTimeModel()
    load = StepLoad(0, 4, 1000)
    for _ in range(1000):
        model.observe(load, 0.05)
    costs = costs_of(model)
    assert costs.predict(load) == pytest.approx(0.05, rel=0.01)
    assert 0.02 < costs.predict(StepLoad(0, 8, 2000)) < 0.2


def test_costs_do_not_drift_while_steps_say_nothing_about_them() -> None:
    """Forgetting must not wind up: after long decoding the cost of prefill is still known."""
    model = trained(TRUE)
    for i in range(5000):
        load = StepLoad(0, 32, 32 * (200 + i % 50))
        model.observe(load, TRUE.predict(load) * (1.0 + 0.05 * math.sin(i)))
    assert costs_of(model).prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.25)


@pytest.mark.parametrize("factor", [100.0, 0.0001])
def test_one_outlier_moves_the_prediction_little(factor: float) -> None:
    model = trained(TRUE, noise=0.03)
    load = StepLoad(0, 16, 8000)
    before = costs_of(model).predict(load)
    model.observe(load, before * factor)
    assert costs_of(model).predict(load) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("factor", [0.5, 2.0, 5.0])
def test_a_lasting_change_is_followed(factor: float) -> None:
    changed = StepCosts(*(factor * cost for cost in TRUE))
    model = trained(changed, noise=0.03, num_steps=300, model=trained(TRUE, noise=0.03))
    assert worst_error(model, changed) < 0.15


def test_costs_are_never_negative() -> None:
    rng = random.Random(3)
    model = StepTimeModel()
    for _ in range(300):
        load = random_load(rng)
        model.observe(load, max(1e-4, 0.05 - 0.0005 * load.decodes) * rng.uniform(0.5, 2.0))
        costs = model.costs
        assert costs is None or min(costs) >= 0.0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_times_that_are_no_durations_are_ignored(bad: float) -> None:
    model = trained(TRUE)
    before = (model.costs, model.num_samples)
    model.observe(StepLoad(10, 10, 10), bad)
    assert (model.costs, model.num_samples) == before


def test_extreme_but_valid_times_do_not_break_the_arithmetic() -> None:
    model = StepTimeModel()
    rng = random.Random(1)
    for _ in range(200):
        model.observe(random_load(rng), 10.0 ** rng.uniform(-9, 6))
        assert all(math.isfinite(cost) for cost in model.costs or ())
