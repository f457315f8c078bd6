"""Seats of running requests: small stable numbers by which the runner keeps what it knows about each."""

from heapq import heapify, heappop, heappush


class Seats:
    """Hands out the lowest free seat and remembers which were given back since the last plan."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        heapify(self._free)
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return heappop(self._free)

    def give_back(self, seat: int) -> None:
        heappush(self._free, seat)
        self._released.append(seat)

    def take_released(self) -> tuple[int, ...]:
        """Each once, though a seat may have been taken and given back again in between."""
        released = tuple(dict.fromkeys(self._released))
        self._released.clear()
        return released
