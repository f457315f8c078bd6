"""The fingerprint that tells a producer's retry from another job under the same id."""

import hashlib

from service.ingest.delivery import Delivery


def digest_of(delivery: Delivery) -> str:
    """Of the record's value; 128 bits are plenty to tell two records of one id apart."""
    return hashlib.blake2b(delivery.value or b"", digest_size=16).hexdigest()
