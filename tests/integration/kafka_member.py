"""A group member in a process of its own, to be killed: completes every job but those whose value begins with
`hold`.

    python -m tests.integration.kafka_member BOOTSTRAP TOPIC GROUP [naive]

Prints the value of each job it gets. `naive` commits one past the highest offset taken, as a consumer without
a tracker does.
"""

import asyncio
import sys
from collections.abc import Sequence

import structlog

from service.ingest import Delivery, JobConsumer, offsets
from tests.support.configs import kafka_config


class CommitsHighest(offsets.PartitionOffsets):
    def committable(self) -> tuple[int, str]:
        return self.next_offset, ""


async def main(bootstrap: str, topic: str, group: str) -> None:
    config = kafka_config(
        kafka_bootstrap=bootstrap,
        group_id=group,
        jobs_topic=topic,
        create_topics=False,
        session_timeout_s=2.0,
        heartbeat_interval_s=0.3,
        rebalance_timeout_s=3.0,
        poll_timeout_s=0.05,
        commit_interval_s=0.05,
    )

    def work(deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            value = (delivery.value or b"").decode()
            print(value, flush=True)
            if not value.startswith("hold"):
                consumer.complete(delivery)

    consumer = JobConsumer(config, on_deliveries=work, on_lost=lambda _: None, credit=lambda: 100)
    await consumer.run()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if sys.argv[4:] == ["naive"]:
        from service.ingest import assignments

        vars(assignments)["PartitionOffsets"] = CommitsHighest
    asyncio.run(main(*sys.argv[1:4]))
