"""A real Apache Kafka broker for tests: one JVM on loopback, free port, data in a temporary folder."""

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import for_code

START = Path(__file__).resolve().parents[2] / "ops" / "kafka" / "start"
STOP_LIMIT_S = 30.0


class KafkaBroker:
    """`stop()`, `kill()` and `start()` may be called within a test (in a thread, where an event loop runs):
    port and data stay the same, so clients see a broker that restarts. Whoever stops it starts it again."""

    def __init__(self, folder: Path, *, proxied: tuple[int, int] | None = None) -> None:
        """`proxied` names a second port, and the port of a proxy to it that the broker tells its clients to use."""
        self._folder = folder
        self.proxied = proxied
        self._process: subprocess.Popen[str] | None = None
        self._jvm_pid = 0
        self._names = itertools.count()
        self.bootstrap = ""

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        if self._process is not None:
            return
        port = self.bootstrap.rpartition(":")[2] or "0"
        command = [str(START), "--data", str(self._folder / "data"), "--port", port, "--follow-parent"]
        if self.proxied is not None:
            command += ["--proxied", "{}:{}".format(*self.proxied)]
        log = self._folder / "kafka.log"
        with log.open("a") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("ready "):
            process.wait(STOP_LIMIT_S)
            process.stdout.close()
            raise RuntimeError(f"Kafka did not start:\n{log.read_text()[-4000:]}")
        _, self.bootstrap, pid = line.split()
        self._jvm_pid = int(pid.removeprefix("pid="))
        self._process = process

    def stop(self) -> None:
        """As an operator would: SIGTERM, wait until it is gone."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """As a crash would: no goodbye to clients, no clean log."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if how is signal.SIGKILL:
            os.kill(self._jvm_pid, signal.SIGKILL)
        else:
            process.send_signal(how)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.kill(self._jvm_pid, signal.SIGKILL)
            process.kill()
            process.wait()
        finally:
            if process.stdout is not None:
                process.stdout.close()

    def unique(self, word: str) -> str:
        """A name that no other test uses, for a topic or a group."""
        return f"{word}-{next(self._names)}-{uuid.uuid4().hex[:6]}"

    async def new_topic(self, partitions: int = 1, *, name: str | None = None, **config: str) -> str:
        """Creates a topic; keywords are its settings with dots as underscores
        (`max_message_bytes="1048576"`)."""
        topic = name or self.unique("topic")
        settings = {key.replace("_", "."): value for key, value in config.items()}
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await admin.start()
        try:
            response = await admin.create_topics([NewTopic(topic, partitions, 1, topic_configs=settings)])
        finally:
            await admin.close()
        for _, code, *message in response.topic_errors:
            assert code == 0, f"topic {topic}: {for_code(code).__name__} {message}"
        return topic


def _missing() -> str | None:
    absent = [tool for tool in ("java", "mvn") if shutil.which(tool) is None]
    return f"{' and '.join(absent)} not on the PATH" if absent else None


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaBroker]:
    folder = Path(tempfile.mkdtemp(prefix="tailrace-test-kafka-"))
    broker = KafkaBroker(folder)
    try:
        reason = _missing()
        if reason is None:
            try:
                broker.start()
            except RuntimeError as error:
                reason = str(error)
        if reason is not None:
            message = f"NO REAL KAFKA, its guarantees are NOT tested: {reason}"
            if os.environ.get("CI") == "true":
                pytest.fail(message, pytrace=False)
            pytest.skip(message)
        yield broker
    finally:
        broker.stop()
        shutil.rmtree(folder, ignore_errors=True)
