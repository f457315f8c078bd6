"""Commands as bytes of the Redis protocol, packed in advance where they repeat.

redis-py packs argument by argument; with one script call per job and step that is most of the cost of a step.
"""

from collections.abc import Sequence


def pack_args(args: Sequence[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args])


def pack_command(*args: bytes | str | int) -> bytes:
    encoded = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in args]
    return b"*%d\r\n" % len(encoded) + pack_args(encoded)
