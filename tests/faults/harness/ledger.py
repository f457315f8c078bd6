"""What was sent: every job is on disk before it is sent, and its place in the topic once Kafka has acknowledged it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class Sent:
    """A record that Kafka has acknowledged."""

    job_id: str
    partition: int
    offset: int


@dataclass
class Ledger:
    path: Path
    bodies: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By job id; of jobs that were acknowledged. A record that is no job has the body {}."""
    sent: list[Sent] = field(default_factory=list)
    _file: TextIO | None = None

    def intend(self, job_id: str, body: dict[str, Any]) -> None:
        self._write({"intended": job_id, "body": body})

    def acknowledge(self, job_id: str, body: dict[str, Any], partition: int, offset: int) -> None:
        self._write({"acknowledged": job_id, "partition": partition, "offset": offset})
        self.bodies[job_id] = body
        self.sent.append(Sent(job_id, partition, offset))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            self._file = self.path.open("a")
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
