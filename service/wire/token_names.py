"""How single tokens are called beside their log-probabilities: by their text, or by their bytes where those are none.

The form for bytes is OpenAI's: `bytes:\\xe2\\x80`.
"""

import re
from collections.abc import Iterable

_BYTES = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)\Z")


def token_name(data: bytes) -> str:
    """The text of a token's bytes. A character may be cut over several tokens, and a part of one has no text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(name: str) -> bytes:
    """The bytes that `token_name` was given."""
    match = _BYTES.match(name)
    return bytes.fromhex(match[1].replace("\\x", "")) if match else name.encode()


def distinct_names(tokens: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Names by id, all different: of tokens that share one the first keeps it and the others show their ids.

    `A` as a piece and `A` as a byte are two tokens, with a log-probability each.
    """
    names: dict[int, str] = {}
    taken: set[str] = set()
    for token_id, name in tokens:
        if token_id in names:
            continue
        while name in taken:
            name += f" (token_id:{token_id})"
        taken.add(name)
        names[token_id] = name
    return names
