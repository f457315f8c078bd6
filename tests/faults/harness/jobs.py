"""The jobs of a run. A job is a function of its index, so a fault-free run gives the texts for all the others."""

import random
from typing import Any

NUM_JOBS = 160
"""Different jobs; a run sends some of them."""


def job(index: int, **changes: Any) -> dict[str, Any]:
    """Returns the job with this index: its length, sampling and number of choices differ from its neighbours'."""
    draw = random.Random(index)
    body: dict[str, Any] = {
        "id": f"job-{index}",
        "prompt": f"{index}: " + "why is the sky blue? " * draw.randint(1, 12),
        "max_tokens": draw.randint(20, 80),
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": draw.choice([0, 1]),
        "n": draw.choice([1, 1, 1, 2]),
        "stream": draw.random() > 0.1,
    }
    return body | changes


def max_tokens(body: dict[str, Any]) -> int:
    return int(body["max_tokens"]) * int(body.get("n", 1))
