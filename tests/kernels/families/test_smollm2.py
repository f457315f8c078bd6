"""SmolLM2-135M-Instruct from its GGUF: greedy tokens in float32 equal those of transformers."""

import warnings
from collections.abc import Sequence

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kernels.loading import load_runner
from kernels.runner import Runner
from kernels.weights.source import ModelSource
from tests.kernels.driving import generate, tokens_of
from tests.kernels.needs import real_model
from tests.kernels.tiny import reference_tokens
from tests.support.configs import runner_options

pytestmark = pytest.mark.model

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL = "smollm2-135m-instruct"
NUM_TOKENS = 32
NUM_GENERATED_BY_TRANSFORMERS = 2
TEXTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "The three laws of motion state that",
    "Liebe Grüße aus",
    "1, 1, 2, 3, 5, 8,",
    "A",
    "To make bread you need flour, water, salt and",
    "SELECT name FROM users WHERE",
    "The river rose overnight. By morning the mill's tailrace had flooded the lower meadow, and the miller",
    "Photosynthesis converts light into",
    "Dear Sir or Madam, I am writing to complain about",
    "List the planets of the solar system in order:",
    "import numpy as np\n\nx = np.",
    "In 1969, two astronauts",
    "The difference between a virus and a bacterium is",
    "こんにちは、世界",
    "Summarize: A queue holds work until somebody is free to do it. With more work than hands it grows.",
    "Q: What is 17 times 3?\nA:",
)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return real_model(MODEL)


@pytest.fixture(scope="module")
def reference(source: ModelSource) -> PreTrainedModel:
    """transformers' Llama; its weights come through the gguf package's reader, not ours."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
        )
    )
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for layer in range(30):
        for ours, theirs in LAYER_NAMES.items():
            names[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    state = {}
    for tensor in GGUFReader(source.path).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            # Converters interleave the two halves of each head: row 2i is i, row 2i + 1 is 32 + i.
            heads = values.view(-1, 64, 576)
            values = torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).view(-1, 576)
        state[names[tensor.name]] = values
    model.load_state_dict(state, strict=False)
    assert set(state) | {"lm_head.weight"} == set(model.state_dict())
    return model.eval()


@pytest.fixture(scope="module")
def prompts(source: ModelSource) -> list[list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    return [tokenizer.encode(text) for text in TEXTS]


def _load(dtype: str) -> Runner:
    return load_runner(
        runner_options(
            MODEL, device="cpu", dtype=dtype, kv_cache_bytes=1 << 27, max_num_seqs=32, num_threads=1
        )
    )


@pytest.fixture(scope="module")
def runner() -> Runner:
    return _load("float32")


@pytest.fixture(scope="module")
def together(runner: Runner, prompts: list[list[int]]) -> dict[str, list[int]]:
    return dict(tokens_of(generate(runner, prompts, NUM_TOKENS)))


@torch.inference_mode()
def _choices(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """What transformers would choose after the prompt and after each but the last of the tokens."""
    logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    choices: list[int] = logits.argmax(-1).tolist()
    return choices


def test_twenty_prompts_together_equal_transformers(
    reference: PreTrainedModel, prompts: list[list[int]], together: dict[str, list[int]]
) -> None:
    """By induction: if transformers chooses our token after each of our prefixes, it generates our text."""
    for idx, prompt in enumerate(prompts):
        tokens = together[str(idx)]
        assert _choices(reference, prompt, tokens) == tokens, TEXTS[idx]


@pytest.mark.slow
def test_generate_of_transformers_is_equal(
    reference: PreTrainedModel, prompts: list[list[int]], together: dict[str, list[int]]
) -> None:
    for idx, prompt in enumerate(prompts[:NUM_GENERATED_BY_TRANSFORMERS]):
        assert reference_tokens(reference, prompt, NUM_TOKENS) == together[str(idx)], TEXTS[idx]


IN_EVERY_RUN = {0, 7, 17}
"""An ordinary prompt, one of a single token and one of many bytes per character."""


@pytest.mark.parametrize(
    "idx",
    [pytest.param(idx, marks=() if idx in IN_EVERY_RUN else pytest.mark.slow) for idx in range(len(TEXTS))],
)
def test_prompt_alone_equals_the_same_together(
    runner: Runner, prompts: list[list[int]], together: dict[str, list[int]], idx: int
) -> None:
    (generation,) = generate(runner, [prompts[idx]], NUM_TOKENS)

    assert generation.tokens == together[str(idx)], TEXTS[idx]


def test_chunked_prefill_equals_whole_prefill(
    runner: Runner, prompts: list[list[int]], together: dict[str, list[int]]
) -> None:
    generations = generate(runner, prompts, 16, chunk_tokens=5)

    assert tokens_of(generations) == {idx: tokens[:16] for idx, tokens in together.items()}


def test_bfloat16_mostly_agrees_with_float32(
    prompts: list[list[int]], together: dict[str, list[int]]
) -> None:
    """Rounding flips a near tie now and then, after which texts differ; first tokens nearly always agree."""
    tokens = tokens_of(generate(_load("bfloat16"), prompts, 4))

    agreeing = sum(tokens[idx][0] == together[idx][0] for idx in tokens)
    assert agreeing >= len(prompts) - 2
