"""generate, tail, cancel and doctor against a running service."""

import asyncio
import json
import signal
import subprocess
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.service.cli.conftest import ROOT, Service, Tailrace, command
from tests.support.proxy import running_proxy


def test_generate_prints_the_text_and_tail_the_same_later(tailrace: Tailrace) -> None:
    live = tailrace("generate", "Hello", "--max-tokens", "30", "--id", "cli-gen-1")
    assert live.returncode == 0
    assert len(live.stdout) == 31
    late = tailrace("tail", "cli-gen-1")
    assert (late.returncode, late.stdout, late.stderr) == (0, live.stdout, live.stderr)


def test_json_gives_the_events_and_a_verdict(tailrace: Tailrace) -> None:
    ended = tailrace("generate", "Hello", "--max-tokens", "5", "--json")
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [event["kind"] for event in events[:1] + events[-2:]] == ["start", "end", "verdict"]
    assert [event["seq"] for event in events[:-1]] == list(range(len(events) - 1))
    assert events[-1] == {"kind": "verdict", "status": "completed", "complete": True, "problems": []}


def test_refused_job_fails_with_field_value_and_limit(tailrace: Tailrace) -> None:
    ended = tailrace("generate", "Hello", "--max-tokens", "9000")
    assert ended.returncode == 1
    assert "9000" in ended.stderr
    assert "4096" in ended.stderr


def test_bad_option_never_reaches_kafka(tailrace: Tailrace) -> None:
    ended = tailrace("generate", "Hello", "--id", "not allowed")
    assert ended.returncode == 2
    assert "id" in ended.stderr


def test_cancel_ends_a_running_job(tailrace: Tailrace, service: Service) -> None:
    with subprocess.Popen(
        command("generate", "Hello", "--max-tokens", "4000", "--id", "cli-cancel", "--json"),
        env=service.env, cwd=ROOT, stdout=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        assert json.loads(running.stdout.readline())["kind"] == "start"
        cancelled = tailrace("cancel", "cli-cancel", "--wait")
        assert cancelled.stdout.splitlines()[-1] == "cli-cancel ended: cancelled"
        assert json.loads(running.stdout.read().splitlines()[-1])["status"] == "cancelled"
        assert running.wait() == 1


def test_ctrl_c_cancels_the_job(tailrace: Tailrace, service: Service) -> None:
    with subprocess.Popen(
        command("generate", "Hello", "--max-tokens", "4000", "--id", "cli-ctrl-c", "--json"),
        env=service.env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        assert json.loads(running.stdout.readline())["kind"] == "start"
        running.send_signal(signal.SIGINT)
        _, stderr = running.communicate()
        assert running.returncode == 130
        assert "cancelled cli-ctrl-c" in stderr
    assert "cancelled" in tailrace("tail", "cli-ctrl-c").stderr


async def test_ctrl_c_while_redis_is_away_ends_without_traceback(
    tailrace: Tailrace, service: Service
) -> None:
    async with running_proxy(int(service.redis.split(":")[1])) as proxy:
        addresses = {"TAILRACE_REDIS_URL": proxy.url, "TAILRACE_KAFKA_BOOTSTRAP": service.kafka}
        running = await asyncio.create_subprocess_exec(
            *command("generate", "Hello", "--max-tokens", "4000", "--id", "cli-no-redis", "--json"),
            env=service.env | addresses, cwd=ROOT, stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        assert running.stdout is not None
        assert json.loads(await running.stdout.readline())["kind"] == "start"
        proxy.accepting = False
        proxy.cut()
        running.send_signal(signal.SIGINT)
        _, stderr = await running.communicate()
    assert running.returncode == 130
    assert b"cli-no-redis may go on: Redis does not answer" in stderr
    assert b"Traceback" not in stderr
    await asyncio.to_thread(tailrace, "cancel", "cli-no-redis")


def test_id_of_another_job_does_not_show_its_output(tailrace: Tailrace) -> None:
    first = tailrace("generate", "Hello", "--max-tokens", "5", "--id", "cli-taken")
    other = tailrace("generate", "Another", "--max-tokens", "5", "--id", "cli-taken")
    assert (other.returncode, other.stdout) == (1, "")
    assert "id: 'cli-taken' was given to another job before" in other.stderr
    same = tailrace("generate", "Hello", "--max-tokens", "5", "--id", "cli-taken")
    assert (same.returncode, same.stdout) == (0, first.stdout)


def test_waiting_for_the_end_of_an_unknown_job_says_so(service: Service) -> None:
    with subprocess.Popen(
        command("cancel", "cli-nobody", "--wait"),
        env=service.env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stderr is not None
        assert running.stderr.readline().startswith("no worker has taken job cli-nobody yet")
        running.send_signal(signal.SIGINT)
        assert running.wait() == 130


def test_doctor_is_content(tailrace: Tailrace) -> None:
    ended = tailrace("doctor", "--json")
    report = json.loads(ended.stdout)
    assert ended.returncode == 0, report
    assert {check["part"] for check in report["checks"]} >= {"model", "device", "kernels", "kafka", "redis"}


def test_config_tells_where_an_address_comes_from(tailrace: Tailrace, service: Service) -> None:
    shown = json.loads(tailrace("config", "--json").stdout)
    assert shown["TAILRACE_KAFKA_BOOTSTRAP"] == service.kafka
    assert "environment" in next(
        line for line in tailrace("config").stdout.splitlines() if line.startswith("TAILRACE_ENGINE")
    )


def test_readme_examples_run_as_they_are(service: Service, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    for part in readme.split("```python\n")[1:3]:  # the producer, then the reader
        code = part.split("```")[0]
        code = code.replace("127.0.0.1:9092", service.kafka).replace("127.0.0.1:6379", service.redis)
        script = tmp_path / "example.py"
        script.write_text(code)
        ended = subprocess.run(
            [*command()[:1], str(script)], capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("completed, proven whole: True\n")
