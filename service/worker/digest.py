"""The fingerprint that tells a producer's retry from another job under the same id."""

import hashlib

from service.ingest.delivery import Delivery


def digest_of(delivery: Delivery) -> str:
    return digest_of_value(delivery.value or b"")


def digest_of_value(value: bytes) -> str:
    """128 bits are plenty to tell the records of one id apart."""
    return hashlib.blake2b(value, digest_size=16).hexdigest()
