"""Tiny random models that run through the adapter, one for each unusual feature of attention."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from kernels.loading import load_runner
from kernels.runner import Runner
from tests.kernels.tiny import save
from tests.support.configs import runner_options

MakeModel = Callable[[], PreTrainedModel]

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
MOE = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = GROUPED | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * idx for idx in range(8)],
    "long_factor": [2.0 + idx for idx in range(8)],
    "original_max_position_embeddings": 128,
}


def make(architecture: str, config: str, **sizes: Any) -> MakeModel:
    """Every parameter is random, norms and attention sinks included, so that each matters."""

    def model() -> PreTrainedModel:
        torch.manual_seed(0)
        made: PreTrainedModel = getattr(transformers, architecture)(
            getattr(transformers, config)(**sizes)
        ).eval()
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "norm" in name and name.endswith("weight"):
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith(("bias", "sinks")):
                    parameter.normal_(std=0.2)
        made.set_attn_implementation("eager")  # torch's own knows neither soft-capping nor sinks
        return made

    return model


FAMILIES: dict[str, MakeModel] = {
    "gpt2": make(
        "GPT2LMHeadModel",
        "GPT2Config",
        **GPT2_SIZES,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
        scale_attn_by_inverse_layer_idx=True,
    ),
    "gpt_neox": make("GPTNeoXForCausalLM", "GPTNeoXConfig", **BASE, intermediate_size=96),
    "opt": make(
        "OPTForCausalLM", "OPTConfig", **BASE, ffn_dim=96, word_embed_proj_dim=64, tie_word_embeddings=False
    ),
    "stablelm": make("StableLmForCausalLM", "StableLmConfig", **GROUPED, qk_layernorm=True),
    "granite": make(
        "GraniteForCausalLM",
        "GraniteConfig",
        **GROUPED,
        attention_multiplier=0.1,
        logits_scaling=2.0,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
    ),
    "mixtral": make(
        "MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4, sliding_window=None
    ),
    "qwen2_moe": make("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **MOE, shared_expert_intermediate_size=32),
    "qwen3_moe": make("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **MOE, head_dim=16, norm_topk_prob=True),
    "olmoe": make("OlmoeForCausalLM", "OlmoeConfig", **GROUPED, num_experts=4, num_experts_per_tok=2),
    "olmo2": make("Olmo2ForCausalLM", "Olmo2Config", **GROUPED),
    "phi3": make("Phi3ForCausalLM", "Phi3Config", **GROUPED, sliding_window=20),
    "phi3_longrope": make(
        "Phi3ForCausalLM",
        "Phi3Config",
        **GROUPED,
        rope_parameters=LONGROPE,
        original_max_position_embeddings=128,
        sliding_window=None,
    ),
    "starcoder2": make("Starcoder2ForCausalLM", "Starcoder2Config", **GROUPED, sliding_window=20),
    "glm4": make("Glm4ForCausalLM", "Glm4Config", **GROUPED, head_dim=16),
    "cohere": make("CohereForCausalLM", "CohereConfig", **GROUPED, logit_scale=0.5, use_qk_norm=True),
    "cohere2": make(
        "Cohere2ForCausalLM", "Cohere2Config", **GROUPED, sliding_window=20, sliding_window_pattern=2
    ),
    "smollm3": make(
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        **GROUPED,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=20,
    ),
    "gemma2": make(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        **GROUPED,
        head_dim=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        sliding_window=20,
    ),
    "gpt_oss": make(
        "GptOssForCausalLM",
        "GptOssConfig",
        **GROUPED,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=20,
    ),
    "llama4_text": make(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        **GROUPED,
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
        no_rope_layer_interval=3,
        attention_chunk_size=20,
        attn_temperature_tuning=False,
    ),
    "deepseek_v3": make("DeepseekV3ForCausalLM", "DeepseekV3Config", **LATENT),
    "gemma4": make(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        **GROUPED | {"num_hidden_layers": 6, "pad_token_id": 0},
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=20,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=199,
    ),
    "mimo_v2_flash": make(
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        **GROUPED,
        head_dim=16,
        v_head_dim=12,
        sliding_window=20,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
    ),
}


def saved(make_model: MakeModel, folder: Path) -> tuple[PreTrainedModel, Path]:
    model = make_model()
    return model, save(model, folder)


def load(folder: Path, **changes: Any) -> Runner:
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_bytes": 1 << 21,
        "max_num_seqs": 8,
        "num_threads": 1,
    }
    return load_runner(runner_options(str(folder), **options | changes))


def assert_telling(tokens: Sequence[list[int]]) -> None:
    """A model that always generates the same would hide every mistake."""
    assert len({token for row in tokens for token in row}) >= 6, "the reference tokens hardly vary"
