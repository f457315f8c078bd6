"""Baselines in a process that has nothing of ours in it, such as a second pool of OpenMP threads."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from kernels.tools.baseline import NAMES, BaselineFailure, BaselineOptions, Outcome, Request, run_baselines
from kernels.weights.source import ModelSource


def run_baselines_apart(
    source: ModelSource,
    requests: Sequence[Request],
    options: BaselineOptions,
    on_start: Callable[[str], None] = lambda _name: None,
) -> dict[str, Outcome]:
    """Outcomes by name; takes minutes. Should the process die, what it has not measured counts as failed."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(sender, source, requests, options), name="baseline")
    process.start()
    sender.close()
    outcomes: dict[str, Outcome] = {}
    try:
        while len(outcomes) < len(NAMES):
            name, outcome = receiver.recv()
            if outcome is None:
                on_start(name)
            else:
                outcomes[name] = outcome
    except EOFError:
        process.join()
        lost = BaselineFailure(f"its process ended with exit code {process.exitcode}")
        outcomes |= {name: lost for name in NAMES if name not in outcomes}
    finally:
        receiver.close()
        process.kill()
        process.join()
    return outcomes


def _main(
    sender: Connection, source: ModelSource, requests: Sequence[Request], options: BaselineOptions
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it kills us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for item in run_baselines(source, requests, options):
        sender.send(item)


def _end_with_parent() -> None:
    """A parent that is killed leaves nobody to wait for the figures."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
