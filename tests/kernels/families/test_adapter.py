"""Models of transformers that are not native run through the adapter, or are refused with the reason."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kernels.errors import ModelFileError, OptionsError
from kernels.models import adapter
from kernels.models.adapter_loading import load_adapter
from kernels.runner import Runner, RunnerOptions, load_runner
from tests.kernels.driving import generate, tokens_of
from tests.kernels.tiny import reference_tokens, save

NUM_TOKENS = 16
BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.15,
}
GROUPED = BASE | {"num_key_value_heads": 2, "intermediate_size": 96}
GPT2_SIZES = {"vocab_size": 199, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}


def _make(architecture: str, config: str, **sizes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: getattr(transformers, architecture)(getattr(transformers, config)(**sizes))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": _make(
        "GPT2LMHeadModel",
        "GPT2Config",
        **GPT2_SIZES,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.15,
        scale_attn_by_inverse_layer_idx=True,
    ),
    "gpt_neox": _make("GPTNeoXForCausalLM", "GPTNeoXConfig", **BASE, intermediate_size=96),
    "granite": _make(
        "GraniteForCausalLM", "GraniteConfig", **GROUPED, attention_multiplier=0.1, logits_scaling=2.0
    ),
    "mixtral": _make(
        "MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4, sliding_window=None
    ),
    "olmo2": _make("Olmo2ForCausalLM", "Olmo2Config", **GROUPED),
    "phi3": _make("Phi3ForCausalLM", "Phi3Config", **GROUPED, sliding_window=20),
    "starcoder2": _make("Starcoder2ForCausalLM", "Starcoder2Config", **GROUPED, sliding_window=20),
    "cohere2": _make(
        "Cohere2ForCausalLM", "Cohere2Config", **GROUPED, sliding_window=20, sliding_window_pattern=2
    ),
}

REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "gemma2": (
        _make("Gemma2ForCausalLM", "Gemma2Config", **GROUPED, head_dim=16),
        "soft-capping of attention scores",
    ),
    "gpt_oss": (
        _make(
            "GptOssForCausalLM",
            "GptOssConfig",
            **GROUPED,
            head_dim=16,
            num_local_experts=2,
            num_experts_per_tok=1,
        ),
        "attention sinks",
    ),
    "bloom": (
        _make("BloomForCausalLM", "BloomConfig", vocab_size=199, hidden_size=64, n_layer=2, n_head=4),
        "takes no position_ids",
    ),
    "falcon": (
        _make(
            "FalconForCausalLM",
            "FalconConfig",
            vocab_size=199,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        ),
        "0 of the 2 layers use transformers' attention interface",
    ),
    "mamba": (
        _make("MambaForCausalLM", "MambaConfig", vocab_size=199, hidden_size=64, num_hidden_layers=2),
        "takes no position_ids",
    ),
    "t5": (
        _make(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=199,
            d_model=32,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
        ),
        "no decoder-only causal language model",
    ),
}


def _prompts() -> list[list[int]]:
    """Lengths on both sides of block edges and of the window."""
    draw = random.Random(7)
    return [[draw.randrange(199) for _ in range(length)] for length in (1, 15, 16, 17, 41)]


def _saved(make: Callable[[], PreTrainedModel], folder: Path) -> tuple[PreTrainedModel, Path]:
    torch.manual_seed(0)
    model = make().eval()
    return model, save(model, folder)


def _load(folder: Path, **changes: Any) -> Runner:
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_bytes": 1 << 21,
        "max_num_seqs": 8,
        "num_threads": 1,
    }
    return load_runner(RunnerOptions(str(folder), **options | changes))


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path]:
    return _saved(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(family: tuple[PreTrainedModel, Path]) -> dict[str, list[int]]:
    model, _ = family
    return {str(idx): reference_tokens(model, prompt, NUM_TOKENS) for idx, prompt in enumerate(_prompts())}


@pytest.mark.parametrize(("block_size", "chunk_tokens"), [(16, 1 << 30), (48, 7)])
def test_batch_equals_transformers(
    family: tuple[PreTrainedModel, Path], expected: dict[str, list[int]], block_size: int, chunk_tokens: int
) -> None:
    runner = _load(family[1], block_size=block_size)

    assert tokens_of(generate(runner, _prompts(), NUM_TOKENS, chunk_tokens=chunk_tokens)) == expected
    assert runner.eos_token_ids == (2,)


def test_bfloat16_loads(family: tuple[PreTrainedModel, Path]) -> None:
    """The check of logits at loading leaves room for rounding."""
    runner = _load(family[1], dtype="bfloat16")

    (generation,) = generate(runner, [[3, 4, 5]], 2)
    assert generation.error is None


@pytest.mark.parametrize("family_name", sorted(REFUSED))
def test_what_the_adapter_cannot_run_is_refused_with_the_reason(family_name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[family_name]
    _, folder = _saved(make, tmp_path)

    with pytest.raises(ModelFileError, match=reason):
        _load(folder)


def test_attention_that_differs_from_the_models_own_is_found_at_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = _saved(FAMILIES["olmo2"], tmp_path)
    right = adapter.paged_attention

    def nearsighted(*arguments: Any) -> torch.Tensor:
        *others, _ = arguments
        return right(*others, 2)

    load_adapter(folder, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(adapter, "paged_attention", nearsighted)

    with pytest.raises(ModelFileError, match="mixes tokens otherwise than by causal softmax attention"):
        load_adapter(folder, torch.float32, torch.device("cpu"))


def test_window_that_stays_in_the_mask_is_refused(tmp_path: Path) -> None:
    _, folder = _saved(FAMILIES["olmo2"], tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"sliding_window": 20}))

    with pytest.raises(ModelFileError, match="sliding_attention that it does not pass"):
        _load(folder)


def test_missing_tensor_is_refused_not_drawn_at_random(tmp_path: Path) -> None:
    _, folder = _saved(FAMILIES["olmo2"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        _load(folder)


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    _, folder = _saved(FAMILIES["olmo2"], tmp_path)
    raw = json.loads((folder / "config.json").read_text()) | {
        "model_type": "homemade",
        "auto_map": {"AutoConfig": "homemade.Config", "AutoModelForCausalLM": "homemade.Model"},
    }
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "homemade.py").write_text("raise SystemExit('this ran')")

    with pytest.raises(ModelFileError, match="transformers cannot load"):
        _load(folder)


def test_int8_is_refused(tmp_path: Path) -> None:
    _, folder = _saved(FAMILIES["olmo2"], tmp_path)

    with pytest.raises(OptionsError, match="quantization is int8"):
        _load(folder, quantization="int8")


def test_rotation_that_depends_on_the_batch_limits_the_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    sizes = GROUPED | {"max_position_embeddings": 64, "rope_parameters": rope}
    _, folder = _saved(_make("Olmo2ForCausalLM", "Olmo2Config", **sizes), tmp_path)

    assert _load(folder).max_model_len == 64


def test_two_adapted_models_do_not_mix(tmp_path: Path) -> None:
    runners, expected = [], []
    for name in ("olmo2", "gpt2"):
        model, folder = _saved(FAMILIES[name], tmp_path / name)
        runners.append(_load(folder))
        expected.append(reference_tokens(model, [3, 4, 5], 4))

    found = [generate(runner, [[3, 4, 5]], 4)[0].tokens for runner in runners]

    assert found == expected
