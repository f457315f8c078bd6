"""Makes bad inputs out of good ones: at the level of JSON values, and at the level of bytes."""

from collections.abc import Callable
from random import Random
from typing import Any

import orjson

from tests.fuzz.odd_values import LONG, NAMES, RAW, TOKENS, VALUES

_VALUES = tuple(map(orjson.dumps, VALUES))
_MARK = "\x01raw%d\x01"


class Raws:
    """Bytes that stand in place of marked strings of a document once it has been written."""

    def __init__(self) -> None:
        self._raws: list[tuple[bytes, bytes]] = []

    def mark(self, raw: bytes) -> str:
        """Return the string that `write` turns into these bytes."""
        name = _MARK % len(self._raws)
        self._raws.append((orjson.dumps(name), raw))
        return name

    def write(self, document: Any) -> bytes:
        data = orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS)
        for name, raw in self._raws:
            data = data.replace(name, raw)
        return data


def odd_value(rng: Random, raws: Raws) -> Any:
    kind = rng.random()
    if kind < 0.4:
        return raws.mark(rng.choice(RAW))
    # A new object each time: later changes must not reach the table.
    return orjson.loads(rng.choice(_VALUES)) if kind < 0.998 else raws.mark(b'"' + LONG + b'"')


def mutated_json(rng: Random, document: Any) -> bytes:
    """Write a document with one to three changes of fields, values or names."""
    raws = Raws()
    document = orjson.loads(orjson.dumps(document))  # a copy
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        document = _change(rng, document, raws)
    return raws.write(document)


def _change(rng: Random, document: Any, raws: Raws) -> Any:
    places = _places(document)
    if not places or rng.random() < 0.02:
        return odd_value(rng, raws)
    parent, name = rng.choice(places)
    kind = rng.random()
    if kind < 0.5:
        parent[name] = odd_value(rng, raws)
    elif kind < 0.6:
        parent[name] = rng.choice(([parent[name]], {"a": parent[name]}, [parent[name]] * 3))
    elif kind < 0.7:
        del parent[name]
    elif kind < 0.8:
        other, from_name = rng.choice(places)
        # By value: a part may not come to hold itself.
        if from_name in other if isinstance(other, dict) else from_name < len(other):
            parent[name] = orjson.loads(orjson.dumps(other[from_name]))
    elif isinstance(parent, dict):
        _change_name(rng, parent, name, raws)
    else:
        parent.insert(name, odd_value(rng, raws))
    return document


def _change_name(rng: Random, parent: dict[Any, Any], name: str, raws: Raws) -> None:
    kind = rng.random()
    if kind < 0.4:
        parent[raws.mark(orjson.dumps(name) if rng.random() < 0.7 else _escaped(name))] = odd_value(rng, raws)
    elif kind < 0.7:
        parent[rng.choice(NAMES)] = odd_value(rng, raws)
    elif kind < 0.8:
        parent[raws.mark(rng.choice((b'"\\ud800"', b'"a\\udfff"', b'"' + b"k" * 3000 + b'"', b"1")))] = 1
    else:
        parent[name + rng.choice(("s", "_", " ", "\x00"))] = parent.pop(name)


def _escaped(name: str) -> bytes:
    return b'"' + b"".join(b"\\u%04x" % ord(letter) for letter in name if ord(letter) < 0x10000) + b'"'


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, name or index) of a document."""
    places: list[tuple[Any, Any]] = []
    stack = [document]
    while stack:
        part = stack.pop()
        names = list(part) if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()
        for name in names:
            places.append((part, name))
            if isinstance(part[name], (dict, list)):
                stack.append(part[name])
    return places


def respelled_json(rng: Random, document: Any) -> bytes:
    """Write a document in another of the forms that mean the same."""
    data = orjson.dumps(document, option=rng.choice((None, orjson.OPT_INDENT_2, orjson.OPT_SORT_KEYS)))
    if rng.random() < 0.2:
        data = rng.choice((b" ", b"\n", b"\t\r\n ")) + data + rng.choice((b"", b" ", b"\n"))
    return data


def mutated_bytes(rng: Random, data: bytes, tokens: tuple[bytes, ...] = TOKENS) -> bytes:
    """One to four changes of bytes anywhere."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = rng.choice(_EDITS)(rng, data, tokens)
    return data


def _flip(rng: Random, data: bytes, tokens: tuple[bytes, ...]) -> bytes:
    if not data:
        return b"\x00"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _byte(rng: Random, data: bytes, tokens: tuple[bytes, ...]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _insert(rng: Random, data: bytes, tokens: tuple[bytes, ...]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(tokens) + data[at:]


def _overwrite(rng: Random, data: bytes, tokens: tuple[bytes, ...]) -> bytes:
    at = rng.randrange(len(data) + 1)
    token = rng.choice(tokens)
    return data[:at] + token + data[at + len(token) :]


def _cut(rng: Random, data: bytes, tokens: tuple[bytes, ...]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] if rng.random() < 0.5 else data[:at] + data[at + rng.randrange(1, 9) :]


def _repeat(rng: Random, data: bytes, tokens: tuple[bytes, ...]) -> bytes:
    at = rng.randrange(len(data) + 1)
    part = data[at : at + rng.randrange(1, 40)]
    return data[:at] + part * rng.choice((1, 2, 9)) + data[at:]


def _move(rng: Random, data: bytes, tokens: tuple[bytes, ...]) -> bytes:
    first, second = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    return data[second:] + data[first:second] + data[:first]


def _frame(rng: Random, data: bytes, tokens: tuple[bytes, ...]) -> bytes:
    kind = rng.random()
    if kind < 0.4:
        return b"\xef\xbb\xbf" * rng.choice((1, 1, 2)) + data
    if kind < 0.6:
        return data.decode("utf-8", errors="replace").encode(rng.choice(("utf-16-le", "utf-16", "utf-32")))
    return data + rng.choice((b"\x00", data[:50], b"}", b"//", b" " * 1000))


_EDITS: tuple[Callable[[Random, bytes, tuple[bytes, ...]], bytes], ...] = (
    *(_flip, _flip, _byte, _insert, _insert, _overwrite, _cut, _repeat, _move, _frame),
)  # fmt: skip


def bad_json(rng: Random, document: Any) -> bytes:
    """A document with changes of either level, or of both."""
    kind = rng.random()
    if kind < 0.6:
        return mutated_json(rng, document)
    return mutated_bytes(rng, mutated_json(rng, document) if kind < 0.75 else orjson.dumps(document))
