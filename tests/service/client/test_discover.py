"""Addresses: the environment's word first, then a running embedded pair, then the defaults."""

from pathlib import Path

import pytest

from service.client import client_settings
from service.embedded.stack import EmbeddedStack


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
