"""Knobs of the stream side."""

from dataclasses import dataclass

from service.waiting import Backoff


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Fields without a default come from the settings, most of them under the same name."""

    redis_url: str
    namespace: str
    """What every key and channel begins with."""
    worker: str
    """This process's name in start events; empty where nothing is written."""
    stream_ttl_s: int
    """How long the keys of a job outlive the last write to it; while a worker has the job they do not expire."""
    stream_max_events: int
    """Redis trims the oldest events of a log above this, in whole nodes (a hundred more may stay)."""
    command_timeout_s: float = 5.0
    """A round trip that takes longer means a lost connection; what it carried is sent again."""
    connect_timeout_s: float = 5.0
    stalled_after_s: float = 1.0
    """`StreamPublisher.healthy` turns false while a round trip is older than this."""
    heartbeat_s: float = 5.0
    """A connection that has been silent for this long is asked whether it is still there."""
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 2.0
    log_every_s: float = 5.0
    """At most one line in this time says that Redis is away."""
    close_timeout_s: float = 2.0
    claim_ttl_s: float = 15.0
    """How long a namespace stays claimed after the last worker of its deployment has stopped."""

    def backoff(self, failure_event: str) -> Backoff:
        """Returns a back-off between attempts to reach Redis that logs failures as `failure_event`."""
        return Backoff(
            self.reconnect_min_s,
            self.reconnect_max_s,
            failure_event=failure_event,
            recovery_event="redis_available_again",
            log_every_s=self.log_every_s,
        )
