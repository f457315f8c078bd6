"""Spans are measured on transformers' own mask functions; anything else is recognized as no span."""

from collections.abc import Callable

import pytest
import torch
from transformers import masking_utils

from kernels.models.transformers.adapter import Span
from kernels.models.transformers.probe import FAR, measure_span

NO_PADDING = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize("size", [1, 2, 3, 20, 512, 4096, 100_003])
def test_windows_and_chunks_of_every_size(size: int) -> None:
    window = masking_utils.sliding_window_causal_mask_function(size)
    chunk = masking_utils.chunked_causal_mask_function(size, NO_PADDING)

    assert measure_span(window) == Span(window=size)
    # A chunk of one token is the same as a window of one.
    assert measure_span(chunk) == (Span(chunk=size) if size > 1 else Span(window=1))


def test_causal_without_a_span() -> None:
    assert measure_span(masking_utils.causal_mask_function) == Span()
    assert measure_span(masking_utils.sliding_window_causal_mask_function(FAR + 1)) == Span()


@pytest.mark.parametrize(
    "visible",
    [
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_bidirectional_mask_function(20),
        masking_utils.or_masks(
            masking_utils.sliding_window_causal_mask_function(20), lambda b, h, query, key: key < 4
        ),
        masking_utils.and_masks(
            masking_utils.causal_mask_function, lambda b, h, query, key: (query - key) % 2 == 0
        ),
        lambda b, h, query, key: key == query,
        lambda b, h, query, key: (key <= query) & (key > query // 2),
    ],
    ids=["bidirectional", "window on both sides", "first tokens kept", "every other", "itself", "half"],
)
def test_other_patterns_are_none(
    visible: Callable[..., torch.Tensor], request: pytest.FixtureRequest
) -> None:
    expected = Span(window=1) if request.node.callspec.id == "itself" else None
    assert measure_span(visible) == expected
