"""Waiting between attempts to reach Redis, and saying so without flooding the log."""

import asyncio

import structlog

from service.stream.config import StreamConfig

_log = structlog.get_logger(__name__)


class Backoff:
    """Doubles the wait up to a limit; logs at most once per `log_every_s`."""

    def __init__(self, config: StreamConfig, event: str) -> None:
        self._config = config
        self._event = event
        self._wait_s = config.reconnect_min_s
        self._last_log_s = -config.log_every_s
        self._failures = 0

    def succeeded(self) -> None:
        if self._failures:
            _log.info("redis_available_again", after_failures=self._failures)
        self._failures = 0
        self._wait_s = self._config.reconnect_min_s
        self._last_log_s = -self._config.log_every_s

    def failed(self, error: BaseException) -> float:
        """Note a failure; how many seconds to wait before the next attempt."""
        self._failures += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._last_log_s >= self._config.log_every_s:
            self._last_log_s = now_s
            reason = str(error) or type(error).__name__
            _log.warning(self._event, reason=reason, failures=self._failures, retry_in_s=self._wait_s)
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, self._config.reconnect_max_s)
        return wait_s
