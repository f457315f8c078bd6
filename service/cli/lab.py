"""`tailrace lab`: shows which request holds which slot in each iteration, under static and continuous batching."""

import sys
from typing import Any

from scheduler.scheduler_config import Policy
from scheduler.virtual import VirtualRun, run_lengths
from service.cli.console import print_json
from service.errors import SettingsError

EXAMPLES = {"varied": (8, 2, 2, 2, 6, 4, 4, 4), "even": (4,) * 8}
MAX_REQUESTS = 256
MAX_LENGTH = 4_096
MAX_COLUMNS = 120
"""Iterations that are drawn; a longer run says how many are not shown."""
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def lab(*, example: str | None, requests: str | None, slots: int, as_json: bool) -> None:
    """Draw both policies, or print them as JSON. Raises SettingsError for lengths outside the limits."""
    if example and requests is not None:
        raise SettingsError("--example and --requests exclude each other")
    lengths = EXAMPLES[example or "varied"] if requests is None else _parse(requests)
    runs = {
        policy.value: run_lengths(lengths, slots, policy) for policy in (Policy.STATIC, Policy.CONTINUOUS)
    }
    if as_json:
        print_json(
            {
                "requests": lengths,
                "slots": slots,
                "policies": {name: _summary(run) for name, run in runs.items()},
            }
        )
        return
    print(f"{len(lengths)} requests of {' '.join(map(str, lengths))} tokens on {slots} slots\n")
    for name, run in runs.items():
        _draw(name, run)
    static, continuous = len(runs["static"].iterations), len(runs["continuous"].iterations)
    if continuous < static:
        print(f"continuous needs {static - continuous} iterations less ({static / continuous:.2f}×)")
    else:
        print(f"a tie: {_why_tie(lengths, slots)}")


def _why_tie(lengths: tuple[int, ...], slots: int) -> str:
    if len(lengths) <= slots:
        return "every request has a slot from the start, so none waits for one"
    if len(set(lengths)) == 1:
        return "requests of equal length leave nothing to fill"
    return "filling slots earlier does not end the last request sooner"


def _parse(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_REQUESTS:
        raise SettingsError(f"--requests has {len(parts)} lengths; the limit is {MAX_REQUESTS}")
    for part in parts:
        if not part.isdecimal() or not 1 <= int(part) <= MAX_LENGTH:
            raise SettingsError(f"--requests: {part!r} is not a length between 1 and {MAX_LENGTH}")
    return tuple(int(part) for part in parts)


def _summary(run: VirtualRun) -> dict[str, Any]:
    ids = list(run.outcomes)
    finished = {name: outcome.finish_s for name, outcome in run.outcomes.items()}
    return {
        "iterations": len(run.iterations),
        "slot_use": round(run.slot_use, 3),
        "finished_at": [round(finished[name] or 0) for name in ids],
        "grid": [
            [None if name is None else ids.index(name) for name in iteration.slots]
            for iteration in run.iterations
        ],
    }


def _draw(name: str, run: VirtualRun) -> None:
    ids = {request_id: index for index, request_id in enumerate(run.outcomes)}
    shown = run.iterations[:MAX_COLUMNS]
    title = f"{name}: {len(run.iterations)} iterations, slot use {run.slot_use:.1%}"
    rows = [
        [None if (occupant := iteration.slots[slot]) is None else ids[occupant] for iteration in shown]
        for slot in range(run.num_slots)
    ]
    if sys.stdout.isatty():
        _draw_colours(title, rows)
    else:
        print(title)
        for slot, row in enumerate(rows):
            print(f"slot {slot}  " + " ".join("." if cell is None else _letter(cell) for cell in row))
    if len(run.iterations) > len(shown):
        print(f"({len(run.iterations) - len(shown)} more iterations not shown)")
    print()


def _draw_colours(title: str, rows: list[list[int | None]]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(f"[bold]{title}[/bold]")
    for slot, row in enumerate(rows):
        line = Text(f"slot {slot}  ")
        for cell in row:
            if cell is None:
                line.append("· ", style="dim")
            else:
                line.append(_letter(cell).ljust(2), style=f"black on {_COLOURS[cell % len(_COLOURS)]}")
        console.print(line, soft_wrap=True)


def _letter(index: int) -> str:
    """Name requests A, B, … Z, A1, B1, …"""
    again = index // len(_LETTERS)
    return _LETTERS[index % len(_LETTERS)] + (str(again) if again else "")
