"""How long something takes on a device, without the host's time where that can be separated."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch


def median_s(
    call: Callable[[], object], device: torch.device, *, num_runs: int = 10, num_warmups: int = 3
) -> float:
    """The median of single runs, measured between events on CUDA and by the clock elsewhere.

    Launches do not count only while the host is ahead of the device, so this is for calls that keep the device busy for
    longer than the host takes to launch them; use `captured_median_s` for shorter ones.
    """
    for _ in range(num_warmups):
        call()
    if device.type != "cuda":
        return statistics.median(_clocked_s(call) for _ in range(num_runs))
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]  # torch
        for _ in range(num_runs)
    ]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(float(begin.elapsed_time(end)) / 1e3 for begin, end in events)


def captured_median_s(
    calls: Sequence[Callable[[], object]], device: torch.device, *, num_runs: int = 10, num_warmups: int = 3
) -> float:
    """Seconds per call of all `calls` one after the other, the median of several runs.

    On CUDA they are replayed as one graph, as in a step, because launching from Python takes longer than many kernels
    do. Inputs that together exceed the L2 cache are read from memory.
    """

    def run_all() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return median_s(run_all, device, num_runs=num_runs, num_warmups=num_warmups) / len(calls)
    run_all()  # compiles, which a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all()
    seconds = median_s(graph.replay, device, num_runs=num_runs, num_warmups=num_warmups)
    return seconds / len(calls)


def _clocked_s(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s
