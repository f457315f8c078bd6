"""Cuts text into pieces of at most so many tokens, at the best boundary, without losing any text."""

import re
from collections.abc import Callable, Iterator

CountTokens = Callable[[str], int]

# Paragraphs, lines, sentences, words. A pattern matches the gap, which stays with the text before it.
_BOUNDARIES = (
    re.compile(r"\n[ \t]*\n+"),
    re.compile(r"\n"),
    re.compile(r"[.!?;:][\"')\]]*\s+"),
    re.compile(r"\s+"),
)


def split_text(text: str, limit: int, count_tokens: CountTokens) -> list[str]:
    """Return pieces whose concatenation is `text`, each of at most `limit` tokens.

    A single character that exceeds the limit (some take several tokens) is a separate piece. Raises ValueError for a
    limit below 1.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}; must be at least 1")
    if not text:
        return []
    if count_tokens(text) <= limit:
        return [text]
    return list(_merge(_segments(text, limit, count_tokens, 0), limit, count_tokens))


def _segments(text: str, limit: int, count_tokens: CountTokens, level: int) -> Iterator[tuple[str, int]]:
    """Yield (segment, its tokens) in order, each within the limit and cut no finer than needed."""
    num_tokens = count_tokens(text)
    if num_tokens <= limit or len(text) == 1:
        yield text, num_tokens
        return
    if level == len(_BOUNDARIES):
        middle = len(text) // 2
        parts = [text[:middle], text[middle:]]
    else:
        parts = _cut(text, _BOUNDARIES[level])
        level += 1
    for part in parts:
        yield from _segments(part, limit, count_tokens, level)


def _cut(text: str, boundary: re.Pattern[str]) -> list[str]:
    ends = [match.end() for match in boundary.finditer(text)]
    starts = [0, *ends]
    return [part for start, end in zip(starts, [*ends, len(text)], strict=True) if (part := text[start:end])]


def _merge(segments: Iterator[tuple[str, int]], limit: int, count_tokens: CountTokens) -> Iterator[str]:
    """Join neighbours while the sum of their tokens fits."""
    parts: list[str] = []
    total = 0
    for segment, num_tokens in segments:
        if parts and total + num_tokens > limit:
            yield from _checked("".join(parts), limit, count_tokens)
            parts, total = [], 0
        parts.append(segment)
        total += num_tokens
    if parts:
        yield from _checked("".join(parts), limit, count_tokens)


def _checked(piece: str, limit: int, count_tokens: CountTokens) -> Iterator[str]:
    """Halve joined text that takes more tokens than its parts did."""
    if len(piece) == 1 or count_tokens(piece) <= limit:
        yield piece
        return
    middle = len(piece) // 2
    yield from _checked(piece[:middle], limit, count_tokens)
    yield from _checked(piece[middle:], limit, count_tokens)
