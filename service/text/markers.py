"""Finds names of special tokens in text, in time that hardly depends on the number of names."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

_LOOKED_AHEAD: Final = 8
"""Characters that a position must share with a name before names are looked up, so that a text of nothing but `<` or
`<|` takes milliseconds and not a second."""


class Markers:
    """Finds any of a set of names at once. One search for each of six thousand would take a third of a second."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name for name in names if len(name) > 1)
        lengths: dict[str, set[int]] = defaultdict(set)
        for name in self._names:
            lengths[name[0]].add(len(name))
        self._lengths = {first: tuple(sorted(found)) for first, found in lengths.items()}
        self._beginning = re.compile(_beginning_of(self._names)) if self._names else None

    def any_in(self, text: str) -> bool:
        """Tell whether `text` holds any of the names."""
        return next(self._starts(text), None) is not None

    def broken_up(self, text: str, separator: str) -> str:
        """Put the separator after the first character of every name, so that no name stays whole."""
        pieces, begin = [], 0
        for start in self._starts(text):
            pieces.append(text[begin : start + 1])
            begin = start + 1
        return separator.join([*pieces, text[begin:]])

    def _starts(self, text: str) -> Iterator[int]:
        if self._beginning is None:
            return
        for match in self._beginning.finditer(text):
            start = match.start()
            if any(text[start : start + length] in self._names for length in self._lengths[match[0]]):
                yield start


def _beginning_of(names: Iterable[str]) -> str:
    """Write a regular expression for the first character of text that begins like a name."""
    rests: dict[str, set[str]] = defaultdict(set)
    for name in names:
        rests[name[0]].add(name[1:_LOOKED_AHEAD])
    return "|".join(f"{re.escape(first)}(?={_any_of(rests[first])})" for first in sorted(rests))


def _any_of(beginnings: set[str]) -> str:
    """Branch by one character at a time, so that few branches are tried however many names there are."""
    if "" in beginnings:
        return ""
    rests: dict[str, set[str]] = defaultdict(set)
    for beginning in beginnings:
        rests[beginning[0]].add(beginning[1:])
    return "(?:" + "|".join(re.escape(first) + _any_of(rests[first]) for first in sorted(rests)) + ")"
