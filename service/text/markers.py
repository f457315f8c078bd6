"""Names of special tokens, found in text in time that depends on the text and hardly on how many names there are."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator


class Markers:
    """Some vocabularies have six thousand; searching a document for each would take a third of a second."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name for name in names if len(name) > 1)
        lengths: dict[str, set[int]] = defaultdict(set)
        for name in self._names:
            lengths[name[0]].add(len(name))
        self._lengths = {first: tuple(sorted(found)) for first, found in lengths.items()}
        self._first = re.compile("|".join(map(re.escape, self._lengths))) if self._lengths else None

    def any_in(self, text: str) -> bool:
        return next(self._starts(text), None) is not None

    def broken_up(self, text: str, separator: str) -> str:
        """With the separator behind the first character of every name, so that none is whole between two of them."""
        pieces, begin = [], 0
        for start in self._starts(text):
            pieces.append(text[begin : start + 1])
            begin = start + 1
        return separator.join([*pieces, text[begin:]])

    def _starts(self, text: str) -> Iterator[int]:
        if self._first is None:
            return
        for match in self._first.finditer(text):
            start = match.start()
            if any(text[start : start + length] in self._names for length in self._lengths[match[0]]):
                yield start
