"""Names in Redis. The braces make all keys of one job share a cluster slot."""

from dataclasses import dataclass

CONTROL_CHANNEL = "tailrace:control"
EVENT_FIELD = "event"


@dataclass(frozen=True, slots=True)
class JobKeys:
    log: str
    live: str
    """A channel, not a key."""
    meta: str
    cancel: str

    @classmethod
    def of(cls, job_id: str) -> "JobKeys":
        base = f"tailrace:{{{job_id}}}"
        return cls(f"{base}:log", f"{base}:live", f"{base}:meta", f"{base}:cancel")
