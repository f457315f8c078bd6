"""All errors that Tailrace raises, by who is at fault and whether a retry helps.

TailraceError
├── JobError            the job's fault: ends that job, names field, value and limit
├── SettingsError       the operator's: the process does not start
├── DependencyError     the operator's: Kafka or Redis is away; a retry helps
└── InternalError       ours: a bug; ends the jobs it touches, reported with its traceback
"""

from typing import ClassVar, Literal


class TailraceError(Exception):
    """The base of the tree; only its subclasses are raised."""

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
    """A setting, a file or an argument of a command that cannot be used; the message names it."""

    whose = "operator"
    retryable = False


class DependencyError(TailraceError):
    """Kafka, Redis or an embedded server does not answer, or refuses what it is asked."""

    whose = "operator"
    retryable = True


class InternalError(TailraceError):
    """A bug of Tailrace, or data in its own format that it did not write."""

    whose = "tailrace"
    retryable = False
