"""Scores of windows compared with transformers' own log-probabilities of the same tokens."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kernels.errors import OptionsError
from kernels.loading import load_runner
from kernels.runner import Dtype
from kernels.runtime.model_runner import ModelRunner
from kernels.tools.perplexity import score_windows
from tests.kernels.tiny import make_model, save
from tests.support.configs import runner_options

WINDOWS = [
    [(7 * place + start) % 199 for place in range(length)] for start, length in ((3, 2), (11, 70), (0, 33))
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("llama"))


def load(folder: Path, dtype: Dtype = "float32", max_model_len: int | None = None) -> ModelRunner:
    options = runner_options(
        str(folder),
        device="cpu",
        dtype=dtype,
        kv_cache_bytes=1 << 20,
        num_threads=1,
        max_model_len=max_model_len,
    )
    return load_runner(options)


@torch.inference_mode()
def losses_by_transformers(model: PreTrainedModel, window: Sequence[int]) -> torch.Tensor:
    """The log-probabilities of all tokens but the first."""
    ids = torch.tensor([window])
    return torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")


@pytest.mark.parametrize("num_given", [1, 2, 30])
def test_scores_are_those_of_transformers(model: PreTrainedModel, folder: Path, num_given: int) -> None:
    windows = [window for window in WINDOWS if len(window) > num_given]
    expected = [float(losses_by_transformers(model, window)[num_given - 1 :].sum()) for window in windows]

    assert list(score_windows(load(folder), windows, num_given=num_given)) == pytest.approx(
        expected, rel=1e-4
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_do_not_matter_and_windows_know_nothing_of_each_other(folder: Path, dtype: Dtype) -> None:
    runner = load(folder, dtype)
    whole = list(score_windows(runner, WINDOWS, chunk_tokens=128))

    assert list(score_windows(runner, WINDOWS[::-1], chunk_tokens=7))[::-1] == pytest.approx(whole, rel=2e-2)


def test_window_beyond_the_models_length_is_refused(folder: Path) -> None:
    runner = load(folder, max_model_len=40)

    assert len(list(score_windows(runner, [list(range(41))]))) == 1
    with pytest.raises(OptionsError, match="a window has 42 tokens; model and KV pool take 41"):
        list(score_windows(runner, [list(range(42))]))
