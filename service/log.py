"""Structured logs: JSON lines for machines, colours on a terminal. Prompts and outputs are never logged."""

import logging
import sys
from typing import IO, Literal

import structlog

CONTENT_KEYS = frozenset({"prompt", "messages", "text", "content", "output", "prompt_token_ids", "token_ids"})
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure_logging(
    level: Literal["debug", "info", "warning", "error"] = "info",
    log_format: Literal["auto", "json", "console"] = "auto",
    stream: IO[str] | None = None,
) -> None:
    """Route structlog and the standard library's loggers to `stream` (stderr) in one format."""
    stream = stream or sys.stderr
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        drop_content,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(console),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(_LEVELS[level])
    # aiokafka repeats itself at every retry, where our own clients say it once; at DEBUG it logs keys and values.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


def _renderers(console: bool) -> list[structlog.typing.Processor]:
    if console:
        return [structlog.dev.ConsoleRenderer(colors=True, exception_formatter=structlog.dev.plain_traceback)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def drop_content(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Replace fields with users' or models' text by their length, as a last safeguard."""
    for key in CONTENT_KEYS & event.keys():
        value = event[key]
        event[key] = f"<{len(value)}>" if isinstance(value, (str, bytes, list, tuple)) else "<hidden>"
    return event
