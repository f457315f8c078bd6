"""Log lines are JSON and never contain users' text."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from service.log import configure_logging


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, aiokafka = root.handlers, root.level, logging.getLogger("aiokafka").level
    yield
    root.handlers, root.level = handlers, level
    logging.getLogger("aiokafka").setLevel(aiokafka)
    structlog.reset_defaults()


def test_lines_are_json_with_time_and_level() -> None:
    out = io.StringIO()
    configure_logging(stream=out)
    structlog.get_logger("x").info("job ended", job_id="a", status="completed")
    logging.getLogger("other").warning("from a library")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert (first["event"], first["level"], first["job_id"]) == ("job ended", "info", "a")
    assert first["timestamp"].endswith("Z")
    assert (second["event"], second["level"]) == ("from a library", "warning")


def test_prompts_and_outputs_are_never_logged() -> None:
    out = io.StringIO()
    configure_logging(stream=out)
    structlog.get_logger("x").info(
        "job", prompt="my secret", text="his answer", messages=[{"content": "private"}]
    )
    assert not any(word in out.getvalue() for word in ("secret", "answer", "private"))
    assert json.loads(out.getvalue())["prompt"] == "<9>"


def test_level_and_exceptions() -> None:
    out = io.StringIO()
    configure_logging("warning", stream=out)
    log = structlog.get_logger("x")
    log.info("not shown")
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    (line,) = out.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_console_format_for_people() -> None:
    out = io.StringIO()
    configure_logging(log_format="console", stream=out)
    structlog.get_logger("x").info("hello", n=1)
    assert not out.getvalue().startswith("{")
