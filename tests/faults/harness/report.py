"""Writes `ops/reliability.md` from the figures of a run of the suite."""

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]

_HEAD = """# Reliability

Made by `{command}`. A run has 40 jobs and two workers unless the fault says otherwise; each is judged by the guarantees
alone ([how](decisions/0014-fault-suite.md)). Seeds are counted from {first}:
`ops/faults --fault NAME --seed N --runs 1` repeats one.

"""

_FAULTS = """## Faults under load

*Violations*: runs in which an invariant was violated. *Duplicates*: terminal records beyond one for each job, all
equal to the first. *Recovery*: from the fault, or from the end of an outage, until the next event or the result of each
job that was in flight; a killed or stopped worker is noticed after the session timeout of 6 s.

| fault | runs | violations | jobs | duplicates | recovery p50, p99 (s) |
|---|---|---|---|---|---|
"""

_SCENES = """
## Directed search

{num} pairs of a point in the worker's code and an event at that point, each once: {violations} with violations.

| the target job … | pairs | violations |
|---|---|---|
"""

_CONTROLS = """
## Controls

The same with one mechanism switched off. A control must violate something in at least one of its runs.

| fault or scene | without | runs | with violations | violated |
|---|---|---|---|---|
"""


def report(rows: Iterable[Row], command: str) -> str:
    """Returns the page; `rows` are those that `ops/faults --json` prints."""
    plain = [row for row in rows if not row["without"]]
    scenes = [row for row in plain if row["name"].startswith("a job that ")]
    faults = [row for row in plain if row not in scenes]
    first = min((row["seeds"][0] for row in faults), default=1)
    text = _HEAD.format(command=command, first=first) + _FAULTS
    for row in faults:
        recovery = f"{row['recovery_p50_s']}, {row['recovery_p99_s']}" if row["recovery_p99_s"] else "–"
        text += (
            f"| {row['name']} | {row['runs']} | {row['runs_with_violations']} | {row['jobs']}"
            f" | {row['raw_duplicates']} | {recovery} |\n"
        )
    text += _SCENES.format(num=len(scenes), violations=sum(row["runs_with_violations"] for row in scenes))
    ways = sorted({row["name"].split(":")[0].removeprefix("a job that ") for row in scenes})
    for way in ways:
        of_way = [row for row in scenes if row["name"].startswith(f"a job that {way}:")]
        text += f"| {way} | {len(of_way)} | {sum(row['runs_with_violations'] for row in of_way)} |\n"
    text += _CONTROLS
    for row in rows:
        if row["without"]:
            text += (
                f"| {row['name']} | {row['without']} | {row['runs']} | {row['runs_with_violations']}"
                f" | {', '.join(row['violated'])} |\n"
            )
    return text
