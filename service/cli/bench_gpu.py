"""`tailrace bench gpu`."""

from typing import Any

import typer

from kernels.errors import OptionsError
from service.cli.console import log_warnings, note, print_json, print_table

PARTS = ("decode", "attention", "prefill", "sampling")


def gpu(*, as_json: bool) -> None:
    """Exit code 1 where there is nothing to measure: no CUDA device, or no Triton for it."""
    log_warnings()
    try:
        from kernels.tools.gpu_bench import run_here

        report: dict[str, Any] = run_here()
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        note("tailrace: bench gpu needs a CUDA device and the package triton, which is not installed here")
        raise typer.Exit(1) from None
    except OptionsError as error:
        note(f"tailrace: {error}")
        raise typer.Exit(1) from None
    if as_json:
        print_json(report)
        return
    print(f"copy {report['copy_bytes_per_s']:.4g} bytes/s, matrix {report['matrix_flops_per_s']:.4g} flop/s")
    rows = [(part, *_cells(line)) for part in PARTS for line in report[part]]
    columns = ("part", "rows", "tokens", "ms", "tokens/s", "of the measured rate")
    print_table(
        columns, rows, title=f"{report['device']}, torch {report['torch']}, {report['dtype']}", right=True
    )
    print_table(
        ("rows", "context", "ms", "device idle", "look-ahead: ms", "device idle", "times as fast"),
        [_step_cells(line) for line in report["steps"]],
        title="whole steps, one at a time and with look-ahead",
        right=True,
    )


def _step_cells(line: dict[str, Any]) -> tuple[object, ...]:
    return (
        line["num_rows"],
        line["num_tokens"],
        f"{line['period_s'] * 1e3:.3f}",
        f"{line['idle_share']:.1%}",
        f"{line['lookahead_period_s'] * 1e3:.3f}",
        f"{line['lookahead_idle_share']:.1%}",
        f"{line['speedup']:.3f}",
    )


def _cells(line: dict[str, Any]) -> tuple[object, ...]:
    share = "–" if line["share"] is None else f"{line['share']:.1%}"
    return (
        line["num_rows"],
        line["num_tokens"],
        f"{line['seconds'] * 1e3:.3f}",
        f"{line['tokens_per_s']:.0f}",
        share,
    )
