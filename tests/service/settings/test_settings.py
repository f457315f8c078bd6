"""Settings come from the environment only, are checked together and never leak a secret."""

import dataclasses

import pytest

from kernels.deterministic import DeterministicOptions
from kernels.runner import RunnerOptions
from scheduler.scheduler_config import SchedulerConfig
from service.errors import SettingsError
from service.ingest import KafkaConfig
from service.settings import MASK, Settings, changed, load_settings, mask_url, masked, variable_names
from service.stream.stream_config import StreamConfig
from service.worker.specs import ModelLimits


def test_names_that_outside_tools_rely_on() -> None:
    documented = """
        KAFKA_BOOTSTRAP REDIS_URL GROUP_ID JOBS_TOPIC RESULTS_TOPIC DEAD_LETTER_TOPIC MODEL DEVICE DTYPE
        QUANTIZATION ENGINE POLICY MAX_NUM_SEQS MAX_MODEL_LEN BLOCK_SIZE KV_CACHE_BYTES ADMIN_PORT
        DRAIN_GRACE_S"""
    assert {f"TAILRACE_{name}" for name in documented.split()} <= set(variable_names())
    settings = load_settings({})
    assert settings.kafka_bootstrap == "127.0.0.1:9092"
    assert settings.redis_url == "redis://127.0.0.1:6379/0"
    assert settings.jobs_topic == "tailrace.jobs"
    assert settings.results_topic == "tailrace.results"
    assert settings.dead_letter_topic == "tailrace.dead-letter"


def test_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("TAILRACE_MAX_MODEL_LEN", "")
    settings = load_settings()
    assert settings.max_num_seqs == 7
    assert settings.max_model_len is None


def test_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(SettingsError, match=r"TAILRACE_REDIS_ULR.*did you mean TAILRACE_REDIS_URL"):
        load_settings({"TAILRACE_REDIS_ULR": "redis://x"})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MAX_NUM_SEQS", "0", "greater than or equal to 1"),
        ("MAX_NUM_SEQS", "nan", "valid integer"),
        ("DRAIN_GRACE_S", "inf", "less than or equal to 3600"),
        ("KAFKA_BOOTSTRAP", "localhost", "host:port"),
        ("KAFKA_BOOTSTRAP", "a:1,b:99999", "'b:99999' is not host:port"),
        ("REDIS_URL", "http://x", "redis://"),
        ("REDIS_URL", "redis://127.0.0.1:notaport/0", "port must be a number in 1–65535"),
        ("REDIS_URL", "redis://127.0.0.1:65536", "port must be a number in 1–65535"),
        ("REDIS_URL", "redis://h/jobs", "the database is 'jobs'; must be a number"),
        ("REDIS_URL", "redis://h/0?timeout=3", "query option 'timeout' is not one"),
        ("REDIS_URL", "redis://h/0?socket_timeout=soon", "socket_timeout"),
        ("DEVICE", "tpu", "'auto', 'cpu' or 'cuda'"),
        ("JOBS_TOPIC", "a b", "pattern"),
        ("BLOCK_SIZE", "24", "power of two"),
        ("MAX_NUM_BATCHED_TOKENS", "63", "at least TAILRACE_MAX_NUM_SEQS, 64"),
        ("DTYPE", "float8", "'float32', 'bfloat16' or 'float16'"),
        ("QUANTIZATION", "int4", "'none' or 'int8'"),
        ("BF16_PRODUCT", "amx", "'auto', 'dot' or 'fma'"),
        ("STREAM_TTL_S", "0", "greater than or equal to 1"),
        ("STREAM_MAX_EVENTS", "63", "greater than or equal to 64"),
        ("MAX_WAITING", "15", "TAILRACE_MAX_WAITING is 15; must be at least 16: all choices of a job"),
        ("JOBS_TOPIC", "tailrace.results", "must differ"),
    ],
)
def test_message_names_the_variable_value_and_limit(name: str, value: str, says: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings({f"TAILRACE_{name}": value})
    assert says in str(error.value)
    assert value in str(error.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(SettingsError) as error:
        load_settings({"TAILRACE_DEVICE": "x", "TAILRACE_ENGINE": "y", "TAILRACE_NOPE": "z"})
    assert len(str(error.value).splitlines()) == 3


def test_sasl_needs_a_user_and_a_password() -> None:
    with pytest.raises(SettingsError, match="KAFKA_SASL_PASSWORD must be set"):
        load_settings({"TAILRACE_KAFKA_SECURITY_PROTOCOL": "SASL_SSL", "TAILRACE_KAFKA_SASL_USERNAME": "u"})


def test_what_a_command_changes_is_checked_like_the_environment() -> None:
    settings = load_settings(
        {"TAILRACE_MAX_NUM_BATCHED_TOKENS": "64", "TAILRACE_KAFKA_SASL_PASSWORD": "hunter2"}
    )
    assert changed(settings, max_num_seqs=8) == load_settings(
        {
            "TAILRACE_MAX_NUM_BATCHED_TOKENS": "64",
            "TAILRACE_KAFKA_SASL_PASSWORD": "hunter2",
            "TAILRACE_MAX_NUM_SEQS": "8",
        }
    )
    says = "TAILRACE_MAX_NUM_BATCHED_TOKENS is 64; must be at least TAILRACE_MAX_NUM_SEQS, 65"
    with pytest.raises(SettingsError, match=says):
        changed(settings, max_num_seqs=65)


PARTS = [KafkaConfig, StreamConfig, RunnerOptions, SchedulerConfig, DeterministicOptions, ModelLimits]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_no_default_where_there_is_a_setting(part: type) -> None:
    doubled = [
        field.name
        for field in dataclasses.fields(part)
        if field.name in Settings.model_fields and field.default is not dataclasses.MISSING
    ]
    assert doubled == []


def test_secrets_are_masked() -> None:
    environ = {
        "TAILRACE_REDIS_URL": "rediss://user:hunter2@db:6380/1?ssl_cert_reqs=required",
        "TAILRACE_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
        "TAILRACE_KAFKA_SASL_USERNAME": "user",
        "TAILRACE_KAFKA_SASL_PASSWORD": "hunter2",
    }
    settings = load_settings(environ)
    shown = masked(settings)
    assert "hunter2" not in str(shown) + repr(settings.kafka_sasl_password) + settings.redis_url_masked
    assert shown["TAILRACE_REDIS_URL"] == f"rediss://user:{MASK}@db:6380/1?ssl_cert_reqs=required"
    assert list(shown) == list(variable_names())


def test_secret_does_not_leak_through_an_error() -> None:
    with pytest.raises(SettingsError) as error:
        load_settings({"TAILRACE_REDIS_URL": "http://:hunter2@db"})
    assert "hunter2" not in str(error.value)
    with pytest.raises(SettingsError) as error:
        load_settings({"TAILRACE_REDIS_URL": "redis://user:hunter2#more@db"})
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("url", ["redis://h:1/0", "unix:///run/redis.sock", "redis://user@h"])
def test_url_without_password_stays_as_it_is(url: str) -> None:
    assert mask_url(url) == url


def test_every_setting_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())
