"""Addresses come from the environment, else from a running embedded pair, else from the defaults."""

from pathlib import Path

import pytest

from service.client import Client, client_settings
from service.embedded.stack import EmbeddedStack
from service.errors import SettingsError
from service.settings import load_settings


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


async def test_running_pair_is_used_without_any_setting() -> None:
    async with EmbeddedStack() as stack:
        settings = client_settings()
        assert (settings.kafka_bootstrap, settings.redis_url) == (stack.kafka_bootstrap, stack.redis_url)
    assert client_settings().kafka_bootstrap == "127.0.0.1:9092"


async def test_naming_either_address_leaves_the_pair_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_KAFKA_BOOTSTRAP", "kafka.example:9092")
    async with EmbeddedStack():
        settings = client_settings()
        assert settings.kafka_bootstrap == "kafka.example:9092"
        assert settings.redis_url == "redis://127.0.0.1:6379/0"


async def test_given_addresses_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_KAFKA_BOOTSTRAP", "kafka.example:9092")
    monkeypatch.setenv("TAILRACE_JOBS_TOPIC", "jobs")
    client = Client(bootstrap="other.example:9093", redis_url="redis://other.example/2", namespace="mine")
    settings = client.settings
    assert (settings.kafka_bootstrap, settings.redis_url) == ("other.example:9093", "redis://other.example/2")
    assert (settings.namespace, settings.jobs_topic) == ("mine", "jobs")
    assert client.config.kafka_bootstrap == "other.example:9093"
    await client.close()


def test_a_wrong_address_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="TAILRACE_KAFKA_BOOTSTRAP"):
        Client(bootstrap="no port")


def test_settings_and_addresses_do_not_go_together() -> None:
    with pytest.raises(TypeError, match="not both"):
        Client(load_settings({}), namespace="mine")
