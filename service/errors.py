"""The closed tree of what can go wrong, by whose fault it is and whether trying again can help.

TailraceError
├── JobError            the job's: ends that job, names field, value and limit
├── SettingsError       the operator's: the process does not start
├── DependencyError     the operator's: Kafka or Redis is away; retried with back-off
└── InternalError       ours: a bug; ends the jobs it touches, reported with its traceback
"""

from typing import ClassVar, Literal


class TailraceError(Exception):
    whose: ClassVar[Literal["job", "operator", "tailrace"]]
    retryable: ClassVar[bool]


class JobError(TailraceError):
    """A job that cannot be run as written."""

    whose = "job"
    retryable = False

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str | None = None,
        value: str | int | float | None = None,
        limit: str | int | float | None = None,
        job_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.value = value
        self.limit = limit
        self.job_id = job_id
        """The id, when it could be read from the message although the rest could not."""


class SettingsError(TailraceError):
    whose = "operator"
    retryable = False


class DependencyError(TailraceError):
    whose = "operator"
    retryable = True


class InternalError(TailraceError):
    whose = "tailrace"
    retryable = False
