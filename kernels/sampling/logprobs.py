"""Log-probabilities of the model's own distribution, before penalties, temperature and filters."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling.draw import span_sums
from scheduler.plan import TokenLogprobs

_NUM_TOP = 20
"""Always so many are looked up: which of two equal ones is listed must not depend on a neighbour's wish."""


def token_logprobs(
    logits: torch.Tensor, best: npt.NDArray[np.float64], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """One entry per row of `logits` [num_rows, vocab_size] float32, which is overwritten."""
    logits.sub_(torch.from_numpy(best.astype(np.float32)).unsqueeze(1))
    top = logits.topk(min(max(_NUM_TOP, *num_top), logits.shape[1]), dim=1)
    top_values, top_ids = top.values.numpy().astype(np.float64), top.indices.numpy()
    sampled = logits.numpy()[np.arange(len(token_ids)), token_ids].astype(np.float64)
    log_mass = np.log(span_sums(logits.exp_()).sum(axis=1))
    results = []
    for row, count in enumerate(num_top):
        order = np.lexsort((top_ids[row], -top_values[row]))[:count]
        listed = zip(
            top_ids[row][order].tolist(), (top_values[row][order] - log_mass[row]).tolist(), strict=True
        )
        results.append(TokenLogprobs(float(sampled[row] - log_mass[row]), tuple(listed)))
    return results
