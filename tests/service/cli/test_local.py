"""Commands that need no service: lab, config, help, errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service.cli.generate import make_job
from service.errors import SettingsError
from tests.service.cli.conftest import ROOT, Tailrace, clean_env, command

LENGTHS = (8, 2, 2, 2, 6, 4, 4, 4)


def _run(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*arguments),
        env=clean_env(**env),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _lab(in_process: Tailrace, *arguments: str) -> dict[str, dict[str, object]]:
    return dict(json.loads(in_process("lab", *arguments, "--json").stdout)["policies"])


def test_lab_reproduces_the_worked_example(in_process: Tailrace) -> None:
    policies = _lab(in_process, "--example", "varied")
    assert (policies["static"]["iterations"], policies["static"]["slot_use"]) == (14, 0.571)
    assert (policies["continuous"]["iterations"], policies["continuous"]["slot_use"]) == (10, 0.8)


def test_lab_equal_lengths_are_a_tie(in_process: Tailrace) -> None:
    policies = _lab(in_process, "--example", "even")
    assert {(each["iterations"], each["slot_use"]) for each in policies.values()} == {(8, 1.0)}


def test_lab_takes_given_lengths_and_draws_slots_as_rows(in_process: Tailrace) -> None:
    assert _lab(in_process, "--requests", "8,2,2", "--slots", "2")["continuous"]["iterations"] == 8
    drawn = _run("lab", "--requests", "3,1,1", "--slots", "2").stdout
    assert "slot 0  A A A\nslot 1  B C .\n" in drawn
    assert "slot 0  A A A C\nslot 1  B . . .\n" in drawn


@pytest.mark.parametrize("requests", ["", "0", "3,x", "9999999", ",".join("1" * 300)])
def test_lab_refuses_lengths_out_of_range(requests: str, in_process: Tailrace) -> None:
    ended = in_process("lab", "--requests", requests)
    assert ended.returncode == 2
    assert "--requests" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("requests", "slots", "reason"),
    [
        ("8,2,2", "4", "every request has a slot from the start"),
        ("4,4,4", "2", "requests of equal length leave nothing to fill"),
        ("2,3,1,6", "2", "filling slots earlier does not end the last request sooner"),
    ],
)
def test_lab_tells_why_it_is_a_tie(requests: str, slots: str, reason: str, in_process: Tailrace) -> None:
    assert f"a tie: {reason}" in in_process("lab", "--requests", requests, "--slots", slots).stdout


def _make(prompt: str = "x", **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"system": None, "raw": True, "job_id": None, "seed": None, "model": None}
    return make_job(prompt, **(defaults | {"stop": []} | options))


def test_seed_zero_is_a_seed() -> None:
    assert _make(seed=0)["seed"] == 0
    assert not {"seed", "model", "stop"} & _make().keys()


def test_input_that_is_not_utf8_is_one_clear_line() -> None:
    ended = subprocess.run(
        command("generate", "-"),
        env=clean_env(),
        cwd=ROOT,
        input=b"ab\xff\xfe",
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr == b"tailrace: prompt: byte 0xff at offset 2 of standard input is not valid UTF-8\n"
    with pytest.raises(SettingsError, match="must be valid UTF-8"):
        _make("\udcff")


@pytest.mark.parametrize("arguments", [("config", "--json"), ("config",)])
def test_full_disk_under_the_output_is_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            command(*arguments),
            env=_buffered_env(),
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == b"tailrace: output cannot be written: No space left on device\n"


def _buffered_env() -> dict[str, str]:
    """Output is written when the buffer is full or the command ends, as in a shell's pipe."""
    env = clean_env()
    del env["PYTHONUNBUFFERED"]
    return env


def test_output_that_is_a_folder_is_one_line(tmp_path: Path, in_process: Tailrace) -> None:
    (tmp_path / "a.txt").write_text("text")
    for arguments in (("submit", "-", "--wait"), ("summarize", str(tmp_path))):
        ended = in_process(*arguments, "-o", str(tmp_path))
        assert ended.returncode == 2
        assert ended.stderr == f"tailrace: {tmp_path} cannot be written: Is a directory\n"


@pytest.mark.parametrize("arguments", [("list",), ("replay", "0:1")])
def test_dead_letters_without_a_broker_leave_nothing_unclosed(arguments: tuple[str, ...]) -> None:
    ended = _run("dlq", *arguments, TAILRACE_KAFKA_BOOTSTRAP="127.0.0.1:1")
    assert ended.returncode == 1
    assert "Kafka at 127.0.0.1:1 does not answer" in ended.stderr
    assert "Unclosed" not in ended.stderr


def test_unknown_setting_is_one_line_and_exit_code_two() -> None:
    ended = _run("config", TAILRACE_MODLE="x")
    assert ended.returncode == 2
    assert ended.stderr == "tailrace: TAILRACE_MODLE is not a setting; did you mean TAILRACE_MODEL?\n"


def test_nothing_listening_is_one_clear_line(tmp_path: Path) -> None:
    settings = {
        "TAILRACE_KAFKA_BOOTSTRAP": "127.0.0.1:1",
        "TAILRACE_REDIS_URL": "redis://:secret@127.0.0.1:1/0",
    }
    ended = _run("generate", "x", **settings)
    assert ended.returncode == 1
    assert "Redis at redis://:********@127.0.0.1:1/0 does not answer" in ended.stderr
    assert "secret" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, service.cli.app; print(*{'torch', 'aiokafka', 'redis', 'pydantic', 'numba'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []


def test_bench_on_the_deterministic_engine_has_the_published_shape(tmp_path: Path) -> None:
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps([{"prompt_tokens": 20, "max_tokens": length} for length in LENGTHS]))
    ended = _run(
        "bench", "offline", "--workload", str(workload), "--policy", "continuous,static", "--slots", "2", "--json",
        TAILRACE_ENGINE="deterministic",
    )  # fmt: skip
    runs = json.loads(ended.stdout)["runs"]
    assert list(runs) == ["continuous", "static"]
    for run in runs.values():
        assert run["output_tokens"] == sum(LENGTHS)
        assert {"output_tokens_per_s", "total_s", "steps", "slot_use"} <= run.keys()
        assert run["ttft_s"].keys() >= {"p50", "p99"}
        assert run["tpot_s"].keys() >= {"p50", "p99"}
    assert runs["static"]["steps"] > runs["continuous"]["steps"]


def test_reader_that_has_seen_enough_causes_no_noise() -> None:
    with subprocess.Popen(
        command("config"), env=clean_env(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        run.stdout.close()
        assert run.stderr is not None
        assert run.stderr.read() == b""
