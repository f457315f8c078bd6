"""A slow and plain sampler: one row at a time, Python floats, a sort of the whole vocabulary."""

import math
from collections.abc import Sequence

from kernels.sampling.cpu.draw import uniform
from scheduler.plan import SamplingParams

ROUNDING = 1e-6
"""The sampler's weights are float32."""


def adjusted(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
) -> list[float]:
    values = list(logits)
    for token_id, bias in dict(params.logit_bias).items():
        values[token_id] += bias
    for token_id in set(prompt) | set(generated):
        value = values[token_id]
        penalty = params.repetition_penalty
        values[token_id] = value / penalty if value > 0 else value * penalty
    for token_id in set(generated):
        values[token_id] -= params.frequency_penalty * generated.count(token_id) + params.presence_penalty
    if len(generated) < params.min_tokens:
        for token_id in params.banned_token_ids:
            values[token_id] = -math.inf
    return values


def distribution(values: Sequence[float], params: SamplingParams) -> list[float]:
    """Probabilities after temperature, min-p, top-k and top-p."""
    best = max(values)
    weights = [math.exp((value - best) / params.temperature) for value in values]
    kept = {token_id for token_id, weight in enumerate(weights) if weight >= params.min_p}
    order = sorted(kept, key=lambda token_id: -weights[token_id])
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weights[token_id] for token_id in order)
    nucleus, mass = [], 0.0
    for token_id in order:
        nucleus.append(token_id)
        mass += weights[token_id]
        if mass >= params.top_p * total:
            break
    total = sum(weights[token_id] for token_id in nucleus)
    probabilities = [0.0] * len(values)
    for token_id in nucleus:
        probabilities[token_id] = weights[token_id] / total
    return probabilities


def choices(values: Sequence[float], params: SamplingParams, position: int) -> list[int]:
    """The token, or two where the random number lies within rounding of the border between them."""
    if params.temperature == 0.0:
        return [max(range(len(values)), key=lambda token_id: (values[token_id], -token_id))]
    target = float(uniform([params.seed], [position])[0])
    found, reached = [], 0.0
    for token_id, probability in enumerate(distribution(values, params)):
        if probability > 0 and reached - ROUNDING <= target <= reached + probability + ROUNDING:
            found.append(token_id)
        reached += probability
    return found


def log_softmax(logits: Sequence[float]) -> list[float]:
    best = max(logits)
    log_mass = best + math.log(sum(math.exp(value - best) for value in logits))
    return [value - log_mass for value in logits]
