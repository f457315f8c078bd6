"""Configs of native families that the native decoders do not support run through transformers, with a warning."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from kernels import loading
from kernels.errors import ModelFileError
from kernels.weights.hugging_face import open_config
from kernels.weights.native_fields import DEFAULTS
from tests.kernels.driving import generate, tokens_of
from tests.kernels.families.adapter_models import assert_telling, load, make
from tests.kernels.tiny import LLAMA3_ROPE, SIZES, reference_tokens, save

NUM_TOKENS = 12
GEMMA3 = SIZES | {
    "sliding_window": 20,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": False,
}
QWEN2 = {name: value for name, value in SIZES.items() if name != "head_dim"}
WINDOWS = {"use_sliding_window": True, "sliding_window": 20}
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **parameters}}


LONGROPE = _rope(
    "longrope",
    short_factor=[1.0 + 0.1 * idx for idx in range(8)],
    long_factor=[2.0] * 8,
    original_max_position_embeddings=128,
)
YARN = _rope("yarn", original_max_position_embeddings=64)

FOREIGN: list[tuple[str, dict[str, Any], str]] = [
    ("Llama", {"attention_bias": True}, "attention_bias is True"),
    ("Llama", {"mlp_bias": True}, "mlp_bias is True"),
    ("Llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("Llama", YARN, "rope_parameters has rope_type 'yarn'"),
    ("Llama", _rope("dynamic"), "rope_parameters has rope_type 'dynamic'"),
    ("Llama", LONGROPE, "rope_parameters has rope_type 'longrope'"),
    ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("Mistral", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ("Mistral", YARN | {"sliding_window": 20}, "rope_parameters has rope_type 'yarn'"),
    ("Qwen2", {"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
    ("Qwen2", YARN, "rope_parameters has rope_type 'yarn'"),
    ("Qwen2", WINDOWS | {"max_window_layers": 1}, f"layer_types is ['{FULL}', '{SLIDING}', '{SLIDING}']"),
    ("Qwen2", WINDOWS | {"layer_types": [SLIDING, FULL, SLIDING]}, f"layer_types is ['{SLIDING}', '{FULL}'"),
    ("Qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("Qwen3", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ("Qwen3", YARN, "rope_parameters has rope_type 'yarn'"),
    ("Qwen3", WINDOWS | {"max_window_layers": 2}, f"layer_types is ['{FULL}', '{FULL}', '{SLIDING}']"),
    ("Gemma3", {"attention_bias": True}, "attention_bias is True"),
    ("Gemma3", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    ("Gemma3", {"final_logit_softcapping": 5.0}, "final_logit_softcapping is 5.0"),
    ("Gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping is 5.0"),
    (
        "Gemma3",
        {"rope_parameters": {FULL: YARN["rope_parameters"], SLIDING: DEFAULT_ROPE}},
        "rope_parameters has rope_type 'yarn'",
    ),
    (
        "Gemma3",
        {"rope_parameters": {FULL: DEFAULT_ROPE, SLIDING: _rope("linear")["rope_parameters"]}},
        "rope_parameters of layers with a window has rope_type 'linear'",
    ),
]

NATIVE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Llama", {}, {"sliding_window": 512}),
    ("Llama", {}, {"sliding_window": 511, "use_sliding_window": False}),
    ("Llama", {"rope_parameters": LLAMA3_ROPE}, {}),
    (
        "Llama",
        {"max_position_embeddings": 64, "rope_parameters": LLAMA3_ROPE},
        {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": ...}},
    ),
    (
        "Llama",
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_scaling": LLAMA3_ROPE, "rope_parameters": DEFAULT_ROPE},
    ),
    ("Mistral", {"sliding_window": 20}, {"use_sliding_window": False}),
    ("Mistral", {"sliding_window": None}, {}),
    (
        "Qwen2",
        {},
        {"use_sliding_window": ..., "sliding_window": 4, "max_window_layers": 0, "layer_types": ...},
    ),
    ("Qwen2", WINDOWS | {"max_window_layers": 0}, {"layer_types": ...}),
    ("Qwen2", WINDOWS | {"max_window_layers": 3}, {"layer_types": ...}),
    ("Qwen3", WINDOWS | {"layer_types": [SLIDING] * 3}, {"max_window_layers": 3}),
    ("Qwen3", {}, {"num_key_value_heads": 2, "hidden_act": "swish"}),
    (
        "Gemma3",
        {
            "rope_parameters": {
                FULL: _rope("linear")["rope_parameters"] | {"rope_theta": 1e6},
                SLIDING: DEFAULT_ROPE,
            }
        },
        {"rope_parameters": ..., "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
]
"""Family, what the model is made with, and how config.json is then rewritten without changing it (... takes away)."""


def _make(family: str, changes: dict[str, Any]) -> PreTrainedModel:
    sizes = {"Qwen2": QWEN2, "Gemma3": GEMMA3}.get(family, SIZES)
    config = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    return make(f"{family}ForCausalLM", config, **sizes | changes)()


def _prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, 199) for _ in range(length)] for length in (1, 17, 41)]


def _expected(model: PreTrainedModel) -> dict[str, list[int]]:
    rows = [reference_tokens(model, prompt, NUM_TOKENS) for prompt in _prompts()]
    assert_telling(rows)
    return {str(idx): row for idx, row in enumerate(rows)}


@pytest.mark.parametrize(("family", "changes", "reason"), FOREIGN, ids=[f"{f}: {r}" for f, _, r in FOREIGN])
def test_foreign_field_runs_through_transformers(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _make(family, changes)
    folder = save(model, tmp_path)

    with caplog.at_level(logging.WARNING, logger="kernels"):
        runner = load(folder)

    assert [record.getMessage() for record in caplog.records if reason in record.getMessage()] == [
        f"{folder}: {open_config(folder).foreign_field}; the model runs through transformers, slower"
    ]
    assert tokens_of(generate(runner, _prompts(), NUM_TOKENS, chunk_tokens=9)) == _expected(model)


@pytest.mark.parametrize(("family", "changes", "rewritten"), NATIVE)
def test_fields_that_change_nothing_stay_native(
    family: str,
    changes: dict[str, Any],
    rewritten: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _make(family, changes)
    folder = save(model, tmp_path)
    raw = _without_gaps(json.loads((folder / "config.json").read_text()) | rewritten)
    (folder / "config.json").write_text(json.dumps(raw))
    built: list[object] = []
    right = loading.PortableDecoder
    monkeypatch.setattr(
        loading, "PortableDecoder", lambda *args, **kwargs: built.append(args) or right(*args, **kwargs)
    )

    runner = load(folder)

    assert built
    assert open_config(folder).foreign_field is None
    expected = _expected(model)
    assert tokens_of(generate(runner, _prompts(), NUM_TOKENS, chunk_tokens=9)) == expected
    # What transformers itself reads of the same file.
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert _expected(again) == expected


def _without_gaps(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_gaps(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not ...
    }


@pytest.mark.parametrize("family", sorted(DEFAULTS))
def test_defaults_are_those_of_transformers(family: str) -> None:
    config_class = transformers.CONFIG_MAPPING[family]

    assert {name: getattr(config_class, name) for name in DEFAULTS[family]} == DEFAULTS[family]


def test_llama_with_a_window_is_refused(tmp_path: Path) -> None:
    """transformers reads the prompt without the window and generates with it, so there is nothing to compare with."""
    folder = save(_make("Llama", {}), tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"sliding_window": 20}))

    assert open_config(folder).foreign_field == "sliding_window is 20"
    with pytest.raises(
        ModelFileError, match="sliding_attention that LlamaForCausalLM does not put into its mask"
    ):
        load(folder)


def test_bidirectional_gemma3_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = save(_make("Gemma3", {"use_bidirectional_attention": True}), tmp_path)

    assert open_config(folder).foreign_field == "use_bidirectional_attention is True"
    with pytest.raises(ModelFileError, match="attention that is not causal is not supported"):
        load(folder)
