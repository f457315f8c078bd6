"""The worker's side of the consumer: three functions, and what to do when one of them has a bug."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from service.ingest.delivery import Delivery, TopicPartition


class CallbackError(Exception):
    """A callback raised; its exception is the cause. Ours, never the broker's: the consumer ends."""


@dataclass(slots=True)
class Callbacks:
    on_deliveries: Callable[[Sequence[Delivery]], None]
    on_lost: Callable[[Sequence[TopicPartition]], None]
    read_credit: Callable[[], int]
    failure: Exception | None = field(default=None, init=False)
    """Kept, because aiokafka only logs what a rebalance callback raises."""

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        try:
            self.on_deliveries(deliveries)
        except Exception as error:
            self.failure = error
            raise CallbackError from error

    def lose(self, partitions: Sequence[TopicPartition]) -> None:
        try:
            self.on_lost(partitions)
        except Exception as error:
            self.failure = error
            raise CallbackError from error

    def credit(self) -> int:
        try:
            return max(0, self.read_credit())
        except Exception as error:
            self.failure = error
            raise CallbackError from error

    def check(self) -> None:
        """Raises what a callback has raised earlier, where it could not be heard."""
        if self.failure is not None:
            raise CallbackError from self.failure
