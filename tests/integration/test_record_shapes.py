"""No record, whatever it contains, keeps an offset open, affects another record, or gets no answer."""

import itertools

import orjson
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.kafka import KafkaBroker
from tests.support.members import eventually
from tests.support.raw_records import RawRecord, publish_batch
from tests.support.redis import RedisServer
from tests.support.service import ServiceUnderTest, new_service, running_worker

pytestmark = [pytest.mark.kafka, pytest.mark.redis]

NOW_MS = 1_790_000_000_000
ANY_STAMP = str((1 << 63) - 1)
CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


async def committed(service: ServiceUnderTest) -> int:
    """Offset that the group has committed for partition 0; 0 when there is none."""
    admin = AIOKafkaAdminClient(bootstrap_servers=service.kafka.bootstrap)
    await admin.start()
    try:
        offsets = await admin.list_consumer_group_offsets(service.environ["TAILRACE_GROUP_ID"])
    finally:
        await admin.close()
    found = offsets.get(TopicPartition(service.environ["TAILRACE_JOBS_TOPIC"], 0))
    return max(0, found.offset) if found is not None else 0


async def settled(service: ServiceUnderTest, records: list[RawRecord], *, compression: int = 0) -> None:
    """Publishes them before a good job, in one batch; returns when the job has run and all is committed."""
    last = RawRecord(b"last", orjson.dumps({"id": "last", "prompt": "x", "max_tokens": 2}))
    topic = service.environ["TAILRACE_JOBS_TOPIC"]
    await publish_batch(service.kafka.bootstrap, topic, 0, [*records, last], compression=compression)
    async with running_worker(service.settings()) as worker:
        assert (await service.wait_for_results(["last"]))["last"].status == "completed"
        assert worker.parts is not None
        consumer = worker.parts.consumer
        await eventually(lambda: consumer.stats().incomplete == 0, "nothing stays open")
    await service.read_results()
    assert await committed(service) == len(records) + 1


async def test_a_record_without_key_and_value_is_refused_once(
    kafka: KafkaBroker, redis_server: RedisServer
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    await settled(service, [RawRecord(None, None)])
    topic = service.environ["TAILRACE_JOBS_TOPIC"]
    (refusal,) = service.results[f"unparsed:{topic}:0:0"]
    assert (refusal.status, refusal.error and refusal.error.code) == ("failed", "no_value")
    (letter,) = await service.wait_for_dead_letters(1)
    assert (letter.key, letter.value, letter.origin.code) == (None, b"", "no_value")


@pytest.mark.parametrize("codec", CODECS)
async def test_header_names_that_are_not_utf8_are_read(
    kafka: KafkaBroker, redis_server: RedisServer, codec: str
) -> None:
    service = await new_service(kafka, redis_server, partitions=1)
    job = orjson.dumps({"id": "odd-header", "prompt": "x", "max_tokens": 2})
    before = RawRecord(b"first", orjson.dumps({"id": "first", "prompt": "x", "max_tokens": 2}))
    headers = ((b"\xff\xfe", b"1"), (b"traceparent", b"00-1-2-03"))
    await settled(service, [before, RawRecord(b"k", job, headers)], compression=CODECS[codec])
    assert {job_id: len(results) for job_id, results in service.results.items()} == {
        "first": 1, "odd-header": 1, "last": 1,
    }  # fmt: skip
    assert service.results["odd-header"][0].status == "completed"


NAMES = st.sampled_from(
    [b"", b"traceparent", b"tracestate", b"tailrace-attempt", b"\xff", "é".encode(), b"a" * 300]
)
HEADERS = st.lists(st.tuples(NAMES, st.none() | st.binary(max_size=40)), max_size=3).map(tuple)
STAMPS = st.sampled_from(
    [-1, 0, 1, NOW_MS, NOW_MS // 1000, NOW_MS * 1000, NOW_MS * 1_000_000, 253_402_300_800_000, (1 << 63) - 2]
)
BODIES = st.fixed_dictionaries(
    {"prompt": st.text(min_size=1, max_size=8), "max_tokens": st.integers(1, 3)},
    optional={
        "messages": st.just([{"role": "user", "content": "x"}]),
        "deadline": st.sampled_from([0.5, 3600, "2000-01-01T00:00:00Z", "9999-12-31T23:59:59Z"]),
        "metadata": st.dictionaries(st.text(max_size=4), st.none() | st.floats(allow_nan=False), max_size=2),
        "stop": st.sampled_from(["e", ["\u0000"], [256]]),
        "typo": st.just(1),
    },
)
VALUES = st.none() | st.binary(max_size=60) | BODIES
_ids = itertools.count()


def record_of(
    value: bytes | dict[str, object] | None, key: bytes | None, headers: object, stamp: int
) -> RawRecord:
    if isinstance(value, dict):
        value = orjson.dumps({"id": f"shape-{next(_ids)}"} | value)
    return RawRecord(key, value, headers, stamp)  # type: ignore[arg-type]


RECORDS = st.builds(record_of, VALUES, st.none() | st.binary(max_size=20), HEADERS, STAMPS)


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(records=st.lists(RECORDS, min_size=40, max_size=100), codec=st.sampled_from(sorted(CODECS.values())))
async def test_any_records_are_all_settled(
    kafka: KafkaBroker, redis_server: RedisServer, records: list[RawRecord], codec: int
) -> None:
    redis_server.flush()  # each example's deployment is a new one
    service = await new_service(kafka, redis_server, partitions=1, message_timestamp_after_max_ms=ANY_STAMP)
    await settled(service, records, compression=codec)
    assert len(service.results) > 1
