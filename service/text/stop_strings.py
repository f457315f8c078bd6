"""Finds stop strings in text that arrives piece by piece.

The matcher is an Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", 1975): after each
character, its state's depth is the length of the longest end of the text that could still grow into a stop
string, which is exactly what has to be held back.
"""

from collections import deque
from functools import lru_cache


class StopMatcher:
    """Has at most one state per character of the stop strings; in state 0 nothing is held back.

    Immutable once built, and shared between jobs.
    """

    __slots__ = ("_children", "_depth", "_fallback", "_matched")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._matched = [0]
        for stop in stops:
            self._insert(stop)
        self._fallback = [0] * len(self._children)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            child = self._children[state].get(character)
            if child is None:
                child = len(self._children)
                self._children[state][character] = child
                self._children.append({})
                self._depth.append(self._depth[state] + 1)
                self._matched.append(0)
            state = child
        self._matched[state] = self._depth[state]

    def _link(self) -> None:
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._children[state].items():
                self._fallback[child] = self.advance(self._fallback[state], character)
                queue.append(child)
            # Breadth first: the shorter state's match is final by now. The longest match wins.
            self._matched[state] = self._matched[state] or self._matched[self._fallback[state]]

    def advance(self, state: int, character: str) -> int:
        """Return the state after one more character. Amortised O(1): each fallback undoes an earlier step."""
        while state and character not in self._children[state]:
            state = self._fallback[state]
        return self._children[state].get(character, 0)

    def held(self, state: int) -> int:
        """Return how many of the last characters may be the beginning of a stop string."""
        return self._depth[state]

    def matched(self, state: int) -> int:
        """Return the length of the longest stop string that ends here; 0 when none does."""
        return self._matched[state]

    def pass_over(self, state: int) -> int:
        """Return the state to continue from when a match does not count, so that a longer one may still come."""
        while state and not self._children[state]:
            state = self._fallback[state]
        return state

    @property
    def num_states(self) -> int:
        return len(self._children)


@lru_cache(maxsize=64)
def stop_matcher(stops: tuple[str, ...]) -> StopMatcher:
    """Build the matcher of these strings. The last 64 are kept; one has at most 4,097 states, about 1 MB."""
    return StopMatcher(stops)
