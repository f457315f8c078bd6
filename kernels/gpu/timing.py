"""How long something takes on a device, without the host's part where that can be told apart."""

import statistics
import time
from collections.abc import Callable

import torch


def median_s(
    call: Callable[[], object], device: torch.device, *, num_runs: int = 10, num_warmups: int = 3
) -> float:
    """Median of single runs. On CUDA between events in the stream, elsewhere on the clock."""
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


def _clocked_s(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s
