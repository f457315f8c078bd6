"""The worker's claim to its namespace in Redis, and the clock that all workers of a deployment share."""

import asyncio
import hashlib
import time
from collections.abc import Callable

import orjson
import structlog
from aiokafka.errors import KafkaError
from redis.exceptions import ResponseError

from service.errors import SettingsError
from service.ingest.kafka_config import KafkaConfig
from service.ingest.topics import cluster_id
from service.stream.publisher import StreamPublisher
from service.stream.stream_config import StreamConfig

log = structlog.get_logger(__name__)

RETRY_S = 1.0
ASK_TIMEOUT_S = 10.0


class SharedClock:
    """The Redis server's wall clock: a worker whose own clock is wrong neither expires jobs nor has its results
    refused."""

    def __init__(self, own: Callable[[], float] = time.time) -> None:
        self._own = own
        self.offset_s = 0.0
        """Seconds to add to this process's clock."""

    def __call__(self) -> float:
        """Seconds since 1970."""
        return self._own() + self.offset_s

    def set(self, server_s: float, round_trip_s: float) -> None:
        """The server's clock showed `server_s` in a round trip that has just ended."""
        self.offset_s = server_s + round_trip_s / 2 - self._own()


class NamespaceClaim:
    """Claims the namespace. It is all that keys in Redis say about a deployment, so only one may use it at a time.

    A deployment is a Kafka cluster, a group and its topics. Its workers share the claim; it expires some seconds
    after the last of them stops.
    """

    def __init__(
        self, kafka: KafkaConfig, stream: StreamConfig, publisher: StreamPublisher, clock: SharedClock
    ) -> None:
        self._kafka = kafka
        self._stream = stream
        self._publisher = publisher
        self._clock = clock
        self.held = False
        """True once claimed; no job may be opened before."""

    async def run(self) -> None:
        """Claim the namespace and renew the claim until cancelled. Raises SettingsError when another deployment has
        the namespace."""
        identity = await self._identity()
        while True:
            asked_s = time.monotonic()
            try:
                holder, server_s = await self._publisher.claim(identity)
            except ResponseError as error:
                holder, server_s = str(error), 0.0  # The key belongs to another program.
            if holder is not None:
                self.held = False
                raise SettingsError(self._refusal(identity, holder))
            self._clock.set(server_s, time.monotonic() - asked_s)
            if not self.held:
                self._publisher.deployment = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
                self.held = True
                log.info(
                    "namespace_claimed", namespace=self._stream.namespace, clock_offset_s=self._clock.offset_s
                )
            await asyncio.sleep(self._stream.claim_ttl_s / 3)

    async def _identity(self) -> str:
        """Waits while Kafka is away."""
        while True:
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    cluster = await cluster_id(self._kafka)
                break
            except (KafkaError, OSError, TimeoutError):
                await asyncio.sleep(RETRY_S)  # The consumer logs that Kafka is away.
        parts = {
            "Kafka cluster": cluster,
            "group": self._kafka.group_id,
            "jobs topic": self._kafka.jobs_topic,
            "results topic": self._kafka.results_topic,
        }
        return orjson.dumps(parts).decode()

    def _refusal(self, identity: str, holder: str) -> str:
        ours = orjson.loads(identity)
        try:
            theirs = orjson.loads(holder)
            differing = [f"{name} {theirs.get(name)!r}, here {mine!r}" for name, mine in ours.items()
                         if theirs.get(name) != mine]  # fmt: skip
        except (orjson.JSONDecodeError, AttributeError):
            differing = []
        return (
            f"TAILRACE_NAMESPACE is {self._stream.namespace!r}: another deployment uses it in this Redis "
            f"({'; '.join(differing) or 'an unknown one'}); choose another name, or wait "
            f"{self._stream.claim_ttl_s:.0f} s after its last worker has stopped"
        )
