"""GGUF headers that no converter writes: each is refused by name, whatever it would take in time or memory."""

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from kernels.errors import ModelFileError
from kernels.weights.checkpoint import open_checkpoint
from kernels.weights.gguf_config import llama3_factors
from kernels.weights.source import ModelFormat, ModelSource
from tests.fuzz.targets.gguf_bytes import GgufSpec, GgufTensor, good_gguf, write_gguf

GOOD = good_gguf(Random(1))
NAMES = [tensor.name for tensor in GOOD.tensors]
KEYS = [key for key, _, _ in GOOD.keys]


def with_tensor(name: str, **fields: object) -> GgufSpec:
    at = NAMES.index(name)
    changed = replace(GOOD.tensors[at], **fields)  # type: ignore[arg-type]
    return replace(GOOD, tensors=(*GOOD.tensors[:at], changed, *GOOD.tensors[at + 1 :]))


def with_key(name: str, type_id: int, value: object) -> GgufSpec:
    kept = tuple(entry for entry in GOOD.keys if entry[0] != name)
    return replace(GOOD, keys=(*kept, (name, type_id, value)))


def open_spec(spec: GgufSpec, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(write_gguf(spec))
    open_checkpoint(ModelSource(path, ModelFormat.GGUF, "m"), torch.float32)


def test_the_file_that_the_others_differ_from_is_good(tmp_path: Path) -> None:
    open_spec(GOOD, tmp_path)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(GOOD, keys=(*GOOD.keys, GOOD.keys[0])), "key general.architecture is given twice"),
        (replace(GOOD, tensors=(*GOOD.tensors, GOOD.tensors[0])), "tensor token_embd.weight is given twice"),
        (
            replace(GOOD, tensors=(*GOOD.tensors, GgufTensor("model.norm.weight", (2,), (1.0, 2.0)))),
            "output_norm.weight and model.norm.weight are the same",
        ),
        (with_tensor("token_embd.weight", dims=(0, 3)), "token_embd.weight is empty"),
        (
            replace(GOOD, tensors=(*GOOD.tensors, GgufTensor("rope_freqs.weight", (0,)))),
            "rope_freqs.weight is empty",
        ),
        # The product of the sizes is 0 modulo 2**64, and 2**63 as a size is negative for NumPy.
        (with_tensor("blk.0.attn_q.weight", dims=(2, 2**32, 2**32)), "truncated: tensor blk.0.attn_q"),
        (with_tensor("token_embd.weight", dims=(2, 2**63)), "truncated: tensor token_embd.weight"),
        (with_key("llama.block_count", 10, 2**32), "llama.block_count is 4294967296; the limit is 1024"),
        (with_key("llama.block_count", 10, 2**63), "the limit is 1024"),
    ],
)
def test_unsound_headers_are_refused_by_name(spec: GgufSpec, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        open_spec(spec, tmp_path)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("factors", [(0.0,), (float("nan"),), (float("inf"),), (-1.0,), (1.0, 2.0)])
def test_rope_factors_that_are_none_are_refused(factors: tuple[float, ...], tmp_path: Path) -> None:
    tensor = GgufTensor("rope_freqs.weight", (len(factors),), factors)
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight are not those of Llama 3"):
        open_spec(replace(GOOD, tensors=(*GOOD.tensors, tensor)), tmp_path)


def test_a_head_of_any_size_costs_nothing_before_the_layout_is_checked(tmp_path: Path) -> None:
    spec = with_key("llama.attention.key_length", 10, 2**62)
    tensor = GgufTensor("rope_freqs.weight", (1,), (1.0,))
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
        open_spec(replace(spec, tensors=(*spec.tensors, tensor)), tmp_path)


def test_llama3_factors_are_finite_for_published_bases() -> None:
    from kernels.model_config import RopeScaling

    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert np.isfinite(llama3_factors(scaling, 5e5, 128)).all()
