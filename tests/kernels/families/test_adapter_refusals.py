"""What the adapter would compute wrongly is refused at loading, with the architecture and the reason."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.errors import ModelFileError, OptionsError
from kernels.models.transformers import adapter
from kernels.models.transformers.loading import load_adapter
from tests.kernels.families.adapter_models import FAMILIES, GROUPED, MakeModel, load, make, saved

SMALL: dict[str, Any] = {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 2}

REFUSED: dict[str, tuple[MakeModel, str]] = {
    "alibi_bloom": (
        make("BloomForCausalLM", "BloomConfig", vocab_size=199, hidden_size=64, n_layer=2, n_head=4),
        "BloomForCausalLM takes no position_ids",
    ),
    "alibi_mpt": (
        make("MptForCausalLM", "MptConfig", vocab_size=199, d_model=64, n_layers=2, n_heads=4),
        "MptForCausalLM takes no position_ids",
    ),
    "alibi_falcon": (
        make("FalconForCausalLM", "FalconConfig", **SMALL, num_attention_heads=4, alibi=True),
        "0 of the 2 layers of FalconForCausalLM use transformers' attention interface",
    ),
    "falcon": (
        make("FalconForCausalLM", "FalconConfig", **SMALL, num_attention_heads=4),
        "0 of the 2 layers of FalconForCausalLM use transformers' attention interface",
    ),
    "mamba": (
        make("MambaForCausalLM", "MambaConfig", **SMALL),
        "MambaForCausalLM keeps recurrent state",
    ),
    "rwkv": (
        make("RwkvForCausalLM", "RwkvConfig", **SMALL, attention_hidden_size=64),
        "RwkvForCausalLM keeps recurrent state",
    ),
    "hybrid": (
        make(
            "JambaForCausalLM",
            "JambaConfig",
            **GROUPED,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
        "JambaForCausalLM keeps recurrent state",
    ),
    "convolutions": (
        make(
            "Lfm2ForCausalLM",
            "Lfm2Config",
            **GROUPED,
            layer_types=["conv", "full_attention", "conv"],
        ),
        r"Lfm2ForCausalLM has more than attention layers \(layer_types: conv\)",
    ),
    "masks_of_its_own": (
        make("DogeForCausalLM", "DogeConfig", **GROUPED),
        r"not supported: attention masks of its own \(attention_mask\)",
    ),
    "not_causal": (
        make(
            "BertLMHeadModel",
            "BertConfig",
            **SMALL,
            num_attention_heads=4,
            intermediate_size=96,
            pad_token_id=None,
        ),
        "attention that is not causal is not supported",
    ),
    "batch_dependent_scale": (
        make(
            "Llama4ForCausalLM",
            "Llama4TextConfig",
            **GROUPED,
            head_dim=16,
            intermediate_size_mlp=96,
            num_local_experts=2,
            attn_temperature_tuning=True,
        ),
        "attn_temperature_tuning is True; Llama4ForCausalLM scales by the place in the batch",
    ),
    "t5": (
        make(
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


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    make_model, reason = REFUSED[name]
    _, folder = saved(make_model, tmp_path)

    with pytest.raises(ModelFileError, match=reason):
        load(folder)


def _load_with(monkeypatch: pytest.MonkeyPatch, folder: Path, **scores: object) -> None:
    """With an attention of ours that is wrong in these fields."""
    load_adapter(folder, torch.float32, torch.device("cpu"))
    right = adapter.Scores
    monkeypatch.setattr(adapter, "Scores", lambda *args, **kwargs: right(*args, **kwargs | scores))
    load_adapter(folder, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "wrong"),
    [("olmo2", {"window": 2}), ("gemma2", {"softcap": None}), ("gpt_oss", {"sinks": None})],
)
def test_attention_that_differs_from_the_models_own_is_found_at_loading(
    family: str, wrong: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = saved(FAMILIES[family], tmp_path)

    with pytest.raises(
        ModelFileError,
        match=r"mixes tokens otherwise than by causal softmax attention: .* off by up to [\d.e+-]+, [\d.e+-]+ of their",
    ):
        _load_with(monkeypatch, folder, **wrong)


def test_rotation_that_depends_on_a_neighbour_is_found_at_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the limit on positions that test_adapter relies on, the check fails as it should."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    _, folder = saved(
        make("Olmo2ForCausalLM", "Olmo2Config", **GROUPED, rope_parameters=rope | factors), tmp_path
    )
    monkeypatch.setattr("kernels.models.transformers.loading._max_positions", lambda text: 256)

    with pytest.raises(ModelFileError, match="its logits are off by"):
        load_adapter(folder, torch.float32, torch.device("cpu"))


def test_unknown_argument_of_attention_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It might have no effect on a prompt as short as the check's but a large one on a longer prompt."""
    _, folder = saved(FAMILIES["olmo2"], tmp_path)
    from transformers.models.olmo2 import modeling_olmo2

    right = modeling_olmo2.Olmo2Attention.forward
    monkeypatch.setattr(
        modeling_olmo2.Olmo2Attention,
        "forward",
        lambda *args, **kwargs: right(*args, **kwargs, indices=torch.zeros(1)),
    )

    with pytest.raises(ModelFileError, match=r"not supported: sparse attention \(indices\)"):
        load(folder)


def test_window_that_stays_out_of_the_mask_is_refused(tmp_path: Path) -> None:
    _, folder = saved(FAMILIES["olmo2"], tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"sliding_window": 20}))

    with pytest.raises(ModelFileError, match="sliding_attention that Olmo2ForCausalLM does not put into its"):
        load(folder)


def test_missing_tensor_is_refused_not_drawn_at_random(tmp_path: Path) -> None:
    _, folder = saved(FAMILIES["olmo2"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_tensor_that_transformers_ignores_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, folder = saved(FAMILIES["olmo2"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.bias"] = torch.zeros(96)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with caplog.at_level(logging.WARNING, logger="kernels"):
        load(folder)

    assert "1 tensors have no place in the model: model.layers.1.mlp.up_proj.bias" in caplog.text


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    _, folder = saved(FAMILIES["olmo2"], tmp_path)
    raw = json.loads((folder / "config.json").read_text()) | {
        "model_type": "homemade",
        "auto_map": {"AutoConfig": "homemade.Config", "AutoModelForCausalLM": "homemade.Model"},
    }
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "homemade.py").write_text("raise SystemExit('this ran')")

    with pytest.raises(ModelFileError, match="transformers cannot load"):
        load(folder)


def test_int8_is_refused(tmp_path: Path) -> None:
    _, folder = saved(FAMILIES["olmo2"], tmp_path)

    with pytest.raises(OptionsError, match=r"quantization is int8; .* \(model_type is 'olmo2'\)"):
        load(folder, quantization="int8")
