"""The tuning table, the tuner's refusals, and the benchmark at toy size."""

import json
from pathlib import Path

import pytest
import torch

from kernels.model_config import ModelConfig
from kernels.ops.gpu.tuning import DEFAULT, TABLE_PATH, LaunchConfig, launch_config, load_table, overridden
from kernels.tools import tuner
from kernels.tools.checks import CHECKS, Check
from kernels.tools.gpu_bench import BenchSizes, run
from kernels.tools.tuner import TuningRefusedError, candidates, tune
from kernels.tools.workloads import tuning_workload

CPU = torch.device("cpu")
SILU = tuple(check for check in CHECKS if check.name.startswith("silu_mul"))
WIDE, WIDER = LaunchConfig(4, 1, 0, 512), LaunchConfig(4, 1, 0, 2048)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A writable copy, in which the CPU has a name of its own, as devices do."""
    path = tmp_path / "tuning.json"
    path.write_text(TABLE_PATH.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(tuner, "device_key", lambda device: "a device")
    return path


def by_block(op: str, bucket: str, device: torch.device) -> float:
    """The wider the faster."""
    return 1.0 / launch_config(op, bucket, device).block_n


def broken(device: torch.device) -> None:
    raise AssertionError("wrong result")


def test_every_entry_of_the_table_is_a_launch_config() -> None:
    for ops in load_table(TABLE_PATH).values():
        for buckets in ops.values():
            for entry in buckets.values():
                LaunchConfig(**entry)


def test_an_unknown_device_takes_the_defaults_and_an_unknown_bucket_is_an_error() -> None:
    assert launch_config("silu_mul", "any", CPU).block_n == 1024
    with pytest.raises(KeyError, match="n7"):
        launch_config("rms_norm", "n7", CPU)


def test_an_override_lasts_as_long_as_its_block() -> None:
    with overridden("silu_mul", "any", WIDE):
        assert launch_config("silu_mul", "any", CPU) == WIDE
    assert launch_config("silu_mul", "any", CPU).block_n == 1024


def test_the_fastest_candidate_is_written_under_the_devices_name(table: Path) -> None:
    chosen = tune("silu_mul", "any", CPU, tried=(WIDE, WIDER), checks=SILU, measured=by_block, path=table)
    assert chosen == WIDER
    written = load_table(table)
    assert written["a device"]["silu_mul"]["any"]["block_n"] == 2048
    assert written[DEFAULT] == load_table(TABLE_PATH)[DEFAULT]


def test_nothing_is_written_when_nothing_is_faster(table: Path) -> None:
    tune("silu_mul", "any", CPU, tried=(WIDE,), checks=SILU, measured=by_block, path=table)
    assert "a device" not in load_table(table)


def test_refuses_to_write_while_the_ops_check_fails(table: Path) -> None:
    before = table.read_bytes()
    with pytest.raises(TuningRefusedError, match="silu_mul/any: broken failed with AssertionError"):
        tune(
            "silu_mul",
            "any",
            CPU,
            tried=(WIDER,),
            checks=(Check("broken", ("silu_mul",), broken),),
            measured=by_block,
            path=table,
        )
    assert table.read_bytes() == before


def test_refuses_an_op_without_checks(table: Path) -> None:
    with pytest.raises(TuningRefusedError, match="it has no checks"):
        tune("silu_mul", "any", CPU, tried=(WIDER,), checks=(), measured=by_block, path=table)


def test_a_fast_candidate_with_wrong_results_is_passed_over(table: Path) -> None:
    def wrong_when_wider(device: torch.device) -> None:
        assert launch_config("silu_mul", "any", device) != WIDER

    checks = (*SILU, Check("picky", ("silu_mul",), wrong_when_wider))
    chosen = tune("silu_mul", "any", CPU, tried=(WIDER,), checks=checks, measured=by_block, path=table)
    assert chosen.block_n == 1024
    assert "a device" not in load_table(table)


def test_a_candidate_that_does_not_run_or_is_slower_is_passed_over_unchecked(table: Path) -> None:
    checked: list[LaunchConfig] = []

    def by_block_if_it_fits(op: str, bucket: str, device: torch.device) -> float:
        if launch_config(op, bucket, device) == WIDER:
            raise RuntimeError("out of resource: shared memory")
        return by_block(op, bucket, device)

    check = Check(
        "seen", ("silu_mul",), lambda device: checked.append(launch_config("silu_mul", "any", device))
    )
    chosen = tune(
        "silu_mul",
        "any",
        CPU,
        tried=(WIDER, WIDE),
        checks=(check,),
        measured=by_block_if_it_fits,
        path=table,
    )
    assert chosen.block_n == 1024
    assert checked == [chosen]
    assert "a device" not in load_table(table)


def test_every_entry_has_candidates_and_a_workload() -> None:
    for op, buckets in load_table(TABLE_PATH)[DEFAULT].items():
        assert any(True for _ in candidates(op)), op
        for bucket in buckets:
            if op in ("store_kv", "rms_norm", "silu_mul", "embed_tokens"):
                tuning_workload(op, bucket, CPU, scale=1024)()


def test_bench_runs_from_end_to_end_and_reports_json() -> None:
    """At toy size and interpreted, the figures are meaningless; that they are reported is not."""
    config = ModelConfig("llama", 1, 64, 96, 4, 2, 32, 300, 256, 1e-6, 10000.0)
    sizes = BenchSizes(
        config=config,
        dtype=torch.float32,
        decode_batches=(1, 2),
        decode_context=20,
        attention=((1, 40),),
        prefill=((1, 33),),
        flushed_bytes=1 << 12,
        copy_bytes=1 << 16,
        matrix_size=64,
        num_runs=1,
        num_steps=2,
    )
    report = json.loads(json.dumps(run(CPU, sizes)))
    assert [line["num_rows"] for line in report["decode"]] == [1, 2]
    for line in report["steps"]:
        assert line["device_s"] is None, "no device here"
        assert line["speedup"] == line["period_s"] / line["lookahead_period_s"]
    for part in ("decode", "prefill", "attention"):
        for line in report[part]:
            assert line["seconds"] > 0
            assert line["share"] > 0
