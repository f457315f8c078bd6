"""Every op against its plain-torch reference: interpreted here, and on a device where there is one."""

from dataclasses import replace

import pytest
import torch

from kernels.ops.gpu.tuning import TABLE_PATH, load_table
from kernels.ops.paged_attention import gpu_decode, gpu_prefill
from kernels.tools.checks import CHECKS, Check, checks_of
from kernels.tools.checks.attention import ATTENTION_CASES, check_attention
from kernels.tools.checks.case import poisoned_outputs

by_name = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name.replace("torch.", ""))


@by_name
def test_interpreted_op_equals_its_reference(check: Check) -> None:
    check.run(torch.device("cpu"))


@pytest.mark.gpu
@by_name
def test_compiled_op_equals_its_reference(check: Check, cuda_device: torch.device) -> None:
    check.run(cuda_device)


def test_every_op_of_the_tuning_table_has_checks() -> None:
    for table in load_table(TABLE_PATH).values():
        for op in table:
            assert checks_of(op), op


def test_poisoned_outputs_fills_what_is_only_allocated() -> None:
    with poisoned_outputs():
        floats, integers, like = (
            torch.empty(3),
            torch.empty(3, dtype=torch.int32),
            torch.zeros(2).new_empty(2),
        )
    assert floats.isnan().all()
    assert (integers == torch.iinfo(torch.int32).max).all()
    assert like.isnan().all()


@pytest.mark.parametrize("part", ["decode", "prefill"])
def test_control_a_kernel_that_leaves_its_output_out_is_caught(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the launch the output keeps its poison, so the check has to fail."""
    kernel = gpu_decode._reduce_kernel if part == "decode" else gpu_prefill._prefill_kernel
    monkeypatch.setattr(kernel, "launch", lambda *args, **kwargs: None)
    with pytest.raises(AssertionError, match="attention"):
        check_attention(torch.device("cpu"), ATTENTION_CASES[0])


def test_control_a_decode_split_that_is_not_reduced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case with 300 tokens of context spans two splits: with room for only one it has to fail."""
    launch = gpu_decode._reduce_kernel.launch

    def first_split_only(grid: tuple[int, ...], arguments: dict[str, object], **options: int) -> None:
        lens = arguments["context_lens"]
        assert isinstance(lens, torch.Tensor)
        launch(grid, arguments | {"context_lens": lens.clamp(max=gpu_decode.SPLIT_TOKENS)}, **options)

    monkeypatch.setattr(gpu_decode._reduce_kernel, "launch", first_split_only)
    with pytest.raises(AssertionError, match="attention"):
        check_attention(torch.device("cpu"), ATTENTION_CASES[0])


def test_more_splits_than_one_round_of_the_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty-two splits are 8 K of context, too long to interpret, so rounds of two are tested instead."""
    monkeypatch.setattr(gpu_decode, "SPLITS_BLOCK", 2)
    check_attention(torch.device("cpu"), replace(ATTENTION_CASES[0], rows=((1, 900), (1, 300))))


@pytest.mark.parametrize("window", [None, 20])
def test_few_programs_deal_out_the_splits_of_many_rows(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long row among short ones, and one that only pads; the grid is bounded whatever the tables' width."""
    monkeypatch.setattr(gpu_decode, "MAX_PROGRAMS", 3)
    grids = []
    launch = gpu_decode._decode_kernel.launch

    def recorded(grid: tuple[int, ...], arguments: dict[str, object], **options: int) -> None:
        grids.append(grid)
        launch(grid, arguments, **options)

    monkeypatch.setattr(gpu_decode._decode_kernel, "launch", recorded)
    rows = ((1, 1), (1, 700), (1, 256), (1, 257))
    check_attention(torch.device("cpu"), replace(ATTENTION_CASES[0], rows=rows, window=window))
    assert grids == [(3,)]


def test_more_decoding_rows_than_one_block_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode, "ROWS_BLOCKS", (1, 2))
    check_attention(torch.device("cpu"), replace(ATTENTION_CASES[0], rows=((1, 3), (1, 300), (1, 20))))
