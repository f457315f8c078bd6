"""Every knob of the service: typed, read from TAILRACE_* environment variables and from nowhere else."""

import difflib
import inspect
import os
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from redis.asyncio import ConnectionPool
from redis.exceptions import RedisError

from service.errors import SettingsError
from service.wire.limits import MAX_CHOICES

ENV_PREFIX = "TAILRACE_"
MASK = "********"

Part = TypeVar("Part")

TopicName = Annotated[str, Field(min_length=1, max_length=249, pattern=r"^[A-Za-z0-9._-]+$")]


def _zero_is_none(value: object) -> object:
    return None if str(value).strip() == "0" else value


TargetMs = Annotated[Annotated[int, Field(gt=0, le=86_400_000)] | None, BeforeValidator(_zero_is_none)]
"""None: no target; the environment says 0."""


class Settings(BaseSettings):
    """`kafka_bootstrap` is read from `TAILRACE_KAFKA_BOOTSTRAP`; an empty variable counts as unset."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, protected_namespaces=()
    )

    # Kafka
    kafka_bootstrap: str = Field("127.0.0.1:9092", description="Kafka brokers, `host:port,…`")
    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="how the brokers are reached"
    )
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "PLAIN", description="with `SASL_*`"
    )
    kafka_sasl_username: str | None = Field(None, description="with `SASL_*`")
    kafka_sasl_password: SecretStr | None = Field(None, description="with `SASL_*`")
    kafka_ssl_cafile: str | None = Field(None, description="certificate authorities (PEM file)")
    kafka_ssl_certfile: str | None = Field(None, description="client certificate (PEM file)")
    kafka_ssl_keyfile: str | None = Field(None, description="client key (PEM file)")
    group_id: str = Field("tailrace", min_length=1, max_length=249, description="the workers' consumer group")
    jobs_topic: TopicName = Field("tailrace.jobs", description="jobs in")
    results_topic: TopicName = Field("tailrace.results", description="terminal records out")
    dead_letter_topic: TopicName = Field("tailrace.dead-letter", description="what could not be read")
    partitions: int = Field(8, ge=1, le=1_000, description="partitions of topics that a worker creates")
    replication_factor: int = Field(1, ge=1, le=9, description="replicas of topics that a worker creates")
    session_timeout_s: float = Field(45.0, ge=6, le=300, description="a silent worker loses its partitions")
    max_poll_interval_s: float = Field(300.0, ge=10, le=3_600, description="longest gap between two polls")
    max_attempts: int = Field(
        10, ge=1, le=1_000, description="a job begun so often in a row without a token fails"
    )
    max_job_bytes: int = Field(1 << 20, ge=1 << 10, le=16 << 20, description="larger jobs are refused")

    # Redis
    namespace: str = Field(
        "tailrace",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="what keys and channels in Redis begin with; one deployment owns it",
    )
    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey")
    stream_ttl_s: int = Field(3_600, ge=1, le=2_592_000, description="how long a token stream can be read")
    stream_max_events: int = Field(16_384, ge=64, le=1 << 20, description="events kept of one stream")

    # Model and engine
    model: str = Field("smollm2-135m-instruct", min_length=1, description="a folder, a GGUF file or a name")
    served_model_name: str | None = Field(
        None, min_length=1, max_length=128, description="what jobs may call it; default: the model's own name"
    )
    engine: Literal["model", "deterministic"] = Field(
        "model", description="`deterministic`: tokens from a hash, for tests"
    )
    deterministic_step_ms: float = Field(
        0.0, ge=0, le=10_000, description="duration of a step of the deterministic engine"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of weights and KV")
    quantization: Literal["none", "int8"] = Field("none", description="of the linear layers")
    bf16_product: Literal["auto", "dot", "fma"] = Field(
        "auto", description="instruction that multiplies bfloat16 on the CPU; `auto`: the quicker one"
    )
    num_threads: int | None = Field(None, ge=1, le=1_024, description="CPU threads; default: all cores")
    block_size: int = Field(32, ge=8, le=256, description="tokens of a KV block")
    kv_cache_bytes: int = Field(512 << 20, ge=1 << 20, le=1 << 44, description="size of the KV pool")
    max_model_len: int | None = Field(
        None, ge=16, le=1 << 24, description="prompt + output; default: the model's own limit"
    )

    # Scheduling
    policy: Literal["continuous", "static"] = Field("continuous", description="how requests share steps")
    max_num_seqs: int = Field(64, ge=1, le=1_024, description="requests in one step")
    max_num_batched_tokens: int = Field(512, ge=16, le=65_536, description="token budget of one step")
    async_scheduling: Literal["auto", "on", "off"] = Field(
        "auto", description="plan the next step while one runs; `auto`: on a GPU"
    )
    max_waiting: int = Field(
        1_024, ge=1, le=100_000, description="choices of fetched jobs that wait for a slot"
    )
    prefix_caching: bool = Field(True, description="share KV blocks of equal prompt beginnings")
    default_max_tokens: int = Field(256, ge=1, le=1 << 20, description="for jobs without `max_tokens`")
    max_output_tokens: int = Field(16_384, ge=1, le=1 << 20, description="largest `max_tokens`")
    interactive_ttft_ms: TargetMs = Field(2000, description="target of class `interactive`; 0 = none")
    interactive_tpot_ms: TargetMs = Field(100, description="target of class `interactive`; 0 = none")
    standard_ttft_ms: TargetMs = Field(15000, description="target of class `standard`; 0 = none")
    standard_tpot_ms: TargetMs = Field(500, description="target of class `standard`; 0 = none")
    batch_ttft_ms: TargetMs = Field(None, description="target of class `batch`; 0 = none")
    batch_tpot_ms: TargetMs = Field(None, description="target of class `batch`; 0 = none")

    # Process
    worker_id: str | None = Field(
        None, min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$", description="default: `host:pid`"
    )
    admin_host: str = Field("127.0.0.1", min_length=1, description="where health and metrics listen")
    admin_port: int = Field(0, ge=0, le=65_535, description="`/healthz /readyz /metrics`; 0 = off")
    drain_grace_s: float = Field(25.0, ge=0, le=3_600, description="time to finish jobs after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")
    log_format: Literal["auto", "json", "console"] = Field("auto", description="`auto`: console on a tty")

    @field_validator("kafka_bootstrap")
    @classmethod
    def _check_bootstrap(cls, value: str) -> str:
        for address in value.split(","):
            host, _, port = address.strip().rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
                raise ValueError(f"{address.strip()!r} is not host:port with a port in 1–65535")
        return value

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if port == 0:
            raise ValueError("the port must be a number in 1–65535")
        database = parts.path.strip("/")
        if parts.scheme != "unix" and database and not database.isdecimal():
            raise ValueError(f"the database is {database!r}; must be a number")
        _check_redis_options(value)
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"{ENV_PREFIX}BLOCK_SIZE is {self.block_size}; must be a power of two")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"{ENV_PREFIX}MAX_NUM_BATCHED_TOKENS is {self.max_num_batched_tokens}; must be at least "
                f"{ENV_PREFIX}MAX_NUM_SEQS, {self.max_num_seqs}"
            )
        if self.max_waiting < MAX_CHOICES:
            raise ValueError(
                f"{ENV_PREFIX}MAX_WAITING is {self.max_waiting}; must be at least {MAX_CHOICES}: all choices of a "
                f"job (its `n`, up to {MAX_CHOICES}) begin to wait together"
            )
        if self.kafka_security_protocol.startswith("SASL") and not (
            self.kafka_sasl_username and self.kafka_sasl_password
        ):
            raise ValueError(
                f"{ENV_PREFIX}KAFKA_SECURITY_PROTOCOL is {self.kafka_security_protocol}; "
                f"{ENV_PREFIX}KAFKA_SASL_USERNAME and {ENV_PREFIX}KAFKA_SASL_PASSWORD must be set"
            )
        topics = (self.jobs_topic, self.results_topic, self.dead_letter_topic)
        if len(set(topics)) < len(topics):
            raise ValueError(f"jobs, results and dead-letter topics are {', '.join(topics)}; must differ")
        return self

    @property
    def redis_url_masked(self) -> str:
        """For logs: the URL without its password."""
        return mask_url(self.redis_url)


def _check_redis_options(url: str) -> None:
    """redis-py looks at the query's options when it first connects, minutes after the start if Redis is away."""
    try:
        ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]  # redis-py: no hints
    except TypeError as error:
        option = str(error).rpartition(" ")[2]
        raise ValueError(f"the query option {option} is not one that redis-py knows") from None
    except RedisError as error:
        raise ValueError(f"the query's options: {error}") from None


@cache
def variable_names() -> tuple[str, ...]:
    return tuple(ENV_PREFIX + name.upper() for name in Settings.model_fields)


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check the environment; a SettingsError names each wrong variable, its value and its limit."""
    environ = os.environ if environ is None else environ
    ours = {name: value for name, value in environ.items() if name.upper().startswith(ENV_PREFIX)}
    problems = [_unknown(name) for name in sorted(ours) if name.upper() not in variable_names()]
    values = {
        name.upper().removeprefix(ENV_PREFIX).lower(): value
        for name, value in ours.items()
        if value and name.upper() in variable_names()
    }
    try:
        settings = Settings.model_validate(values) if environ is not os.environ else Settings()
    except ValidationError as error:
        problems += _explain(error)
    if problems:
        raise SettingsError("\n".join(problems))
    return settings


def changed(settings: Settings, **changes: Any) -> Settings:
    """Return the same settings but for `changes`, checked like the environment's. Raises SettingsError."""
    try:
        return Settings.model_validate(settings.model_dump(exclude_unset=True) | changes)
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(error))) from None


def part_of(settings: Settings, part: type[Part], **others: Any) -> Part:
    """Build a part's configuration: its fields named like a setting take the setting's value, the rest is in `others`.

    A value in `others` comes before the setting of that name.
    """
    names = [name for name in inspect.signature(part).parameters if name in Settings.model_fields]
    return part(**{name: getattr(settings, name) for name in names} | others)


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name.upper(), variable_names(), n=1)
    hint = f"; did you mean {close[0]}?" if close else "; `tailrace config` lists the names"
    return f"{name} is not a setting{hint}"


def _explain(error: ValidationError) -> list[str]:
    """One line per wrong variable. Values of secrets never appear."""
    lines = []
    for item in error.errors(include_url=False):
        message = item["msg"].removeprefix("Value error, ")
        if not item["loc"]:
            lines.append(message)
            continue
        field = str(item["loc"][0])
        value = MASK if "password" in field else repr(mask_url(str(item["input"])))
        lines.append(f"{ENV_PREFIX}{field.upper()} is {value}: {message}")
    return lines


def mask_url(url: str) -> str:
    """The same URL with its password hidden, if it has one."""
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError:
        return MASK
    if not password:
        # A password with an unquoted # or / ends the address: what is left of it must not be shown either.
        return url if "@" not in url or "@" in parts.netloc else MASK
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:{MASK}@{host}"))


def masked(settings: Settings) -> dict[str, str | int | float | bool | None]:
    """Variable name to value as it may be shown to anybody."""
    shown: dict[str, str | int | float | bool | None] = {}
    for name in Settings.model_fields:
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            value = MASK
        elif name == "redis_url":
            value = mask_url(value)
        shown[ENV_PREFIX + name.upper()] = value
    return shown
