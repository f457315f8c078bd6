"""Which tokens a layer of transformers lets a token see, measured on the mask that it would have built."""

from collections.abc import Callable, Iterator

import torch

from kernels.models.adapter import Span

VisibleFunction = Callable[..., torch.Tensor]
"""transformers' mask function: of (batch, head, query position, key position), True where the query sees the key."""

FAR = 1 << 20
"""Nothing is served that is longer; windows beyond it are none."""


def measure_span(visible: VisibleFunction) -> Span | None:
    """None for a pattern that is neither causal nor a causal window nor a causal chunk."""
    width = _width(visible, FAR)
    if width == FAR + 1:
        return Span() if _is_pattern(visible, Span()) else None
    # The token before those that FAR sees: in a window it sees as many, in chunks it is the last of its own.
    candidates = (Span(window=width), Span(chunk=_width(visible, FAR - width)))
    return next((span for span in candidates if _is_pattern(visible, span)), None)


def _width(visible: VisibleFunction, query: int) -> int:
    return int(_seen(visible, query)[: query + 1].sum())


def _is_pattern(visible: VisibleFunction, span: Span) -> bool:
    return all(
        torch.equal(_seen(visible, query), _expected(span, query)) for query in sorted(set(_queries(span)))
    )


def _queries(span: Span) -> Iterator[int]:
    """Positions on both sides of every edge of the pattern."""
    size = span.window or span.chunk or 1
    for edge in (0, size, 2 * size, 3 * size, FAR):
        yield from (query for query in (edge - 1, edge, edge + 1) if 0 <= query <= FAR)


def _seen(visible: VisibleFunction, query: int) -> torch.Tensor:
    """[query + 4]: of every key up to a few behind the query."""
    keys = torch.arange(query + 4)
    zero = torch.tensor(0)
    return torch.as_tensor(visible(zero, zero, torch.tensor(query), keys)).expand(len(keys))


def _expected(span: Span, query: int) -> torch.Tensor:
    keys = torch.arange(query + 4)
    seen = keys <= query
    if span.window is not None:
        seen &= keys > query - span.window
    if span.chunk is not None:
        seen &= keys // span.chunk == query // span.chunk
    return seen
