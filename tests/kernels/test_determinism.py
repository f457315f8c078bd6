"""The levels of ops/decisions/0009-determinism.md, held on tiny random models.

Level 2 is compared bit by bit, row of logits by row of logits, against each request alone with its prompt in one piece
on one thread. `test_determinism_smollm2` does the same with a real model.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.ops.linear.packing import pack_linear
from tests.kernels.determinism import Circumstances, Load, Logits, Served, load, serve
from tests.kernels.needs import needs_compiled_path
from tests.kernels.tiny import make_model, save

WIDE_WINDOW = "mistral_wide_window"
"""A window that several of the kernel's segments of keys fit in."""
COMPILED = ("llama", "llama3_rope", "mistral_window", WIDE_WINDOW, "qwen2", "qwen3", "gemma3")
IN_EVERY_RUN = ("llama", WIDE_WINDOW, "gemma3")

SHARED = [(5 * place) % 199 for place in range(70)]
LOAD = Load(
    [
        # Lengths on both sides of blocks and of attention's segments; three of four begin with the same 64 tokens.
        [
            *(SHARED[:64] if number % 4 else ()),
            *((11 * number + 7 * place) % 199 for place in range(1 + 9 * number)),
        ]
        for number in range(32)
    ],
    max_tokens=24,
)

CIRCUMSTANCES: Mapping[str, Circumstances] = {
    "batch_of_32": Circumstances(),
    "small_chunks": Circumstances(chunk_tokens=33),
    "three_threads": Circumstances(num_threads=3, chunk_tokens=100),
    "preemption": Circumstances(num_blocks=40, chunk_tokens=64),
    "prefix_hits": Circumstances(prefix_caching=True, chunk_tokens=64),
    "preemption_and_prefix_hits": Circumstances(num_blocks=40, prefix_caching=True),
    "lookahead": Circumstances(num_lookahead_steps=1, num_blocks=60, chunk_tokens=48),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("models")
    folders = {family: save(make_model(family.replace("wide_", "")), root / family) for family in COMPILED}
    config = folders[WIDE_WINDOW] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sliding_window": 200}))
    return folders


def alone(folder: Path, **options: str) -> Served:
    """The logits of each request alone."""
    runner = load(str(folder), Circumstances(), **options)
    runs = [serve(runner, LOAD, Circumstances(), [number]) for number in range(len(LOAD.prompts))]
    tokens = {number: each for run in runs for number, each in run.tokens.items()}
    logits = {place: line for run in runs for place, line in run.logits.items()}
    return Served(tokens, logits, runs[0].stats)


def check_met(name: str, served: Served) -> None:
    """Check that the intended circumstance did occur."""
    if "preemption" in name:
        assert served.stats.num_preemptions > 0
    if "prefix_hits" in name:
        assert served.stats.prefix_hit_tokens > 0


@needs_compiled_path
@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *(
            pytest.param(family, "none", marks=() if family in IN_EVERY_RUN else pytest.mark.slow)
            for family in COMPILED
        ),
        ("llama", "int8"),
        pytest.param(WIDE_WINDOW, "int8", marks=pytest.mark.slow),
        ("gemma3", "int8"),
    ],
)
def test_level_2_logits_are_equal_to_the_bit_on_the_compiled_path(
    family: str, quantization: str, folders: Mapping[str, Path]
) -> None:
    expected = alone(folders[family], quantization=quantization)
    for name, circumstances in CIRCUMSTANCES.items():
        runner = load(str(folders[family]), circumstances, quantization=quantization)

        served = serve(runner, LOAD, circumstances)

        check_met(name, served)
        assert differing(served.logits, expected.logits) == [], name
        assert served.tokens == expected.tokens


def differing(logits: Logits, expected: Logits) -> list[tuple[int, int]]:
    assert logits.keys() == expected.keys()
    return sorted(place for place, line in logits.items() if line != expected[place])


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        pytest.param("mistral_window", marks=pytest.mark.slow),
        pytest.param("gemma3", marks=pytest.mark.slow),
    ],
)
def test_level_1_tokens_are_equal_and_logits_nearly_on_the_portable_path(
    family: str, folders: Mapping[str, Path]
) -> None:
    """In float32, rounding is too small to change any choice of these requests."""
    expected = alone(folders[family], dtype="float32")
    for name, circumstances in CIRCUMSTANCES.items():
        served = serve(load(str(folders[family]), circumstances, dtype="float32"), LOAD, circumstances)

        check_met(name, served)
        assert served.tokens == expected.tokens, name
        assert served.logits.keys() == expected.logits.keys()
        for place, line in served.logits.items():
            ours, theirs = (np.frombuffer(each, np.float32) for each in (line, expected.logits[place]))
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_equal_steps_give_equal_bits_on_any_path(dtype: str, folders: Mapping[str, Path]) -> None:
    """The same plans in the same order on the same number of threads give the same results."""
    circumstances = Circumstances(chunk_tokens=48, num_threads=2)
    torch.set_num_threads(2)
    first, second = (
        serve(load(str(folders["llama"]), circumstances, dtype=dtype), LOAD, circumstances) for _ in range(2)
    )

    assert differing(first.logits, second.logits) == []


@needs_compiled_path
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "control_relaxed"])
def test_control_without_the_fixed_order_a_rows_bits_depend_on_the_rows_beside_it(strict: bool) -> None:
    """The product that ops/bench/determinism.py compares with ours is as accurate but not bit-identical."""
    from ops.bench.relaxed_tile import product

    torch.manual_seed(0)
    x, packed = torch.randn(12, 96).bfloat16(), pack_linear(torch.randn(64, 96))
    together, alone = torch.empty(2, 12, 32), torch.empty(2, 1, 32)
    product(x, packed, together, strict=strict)
    product(x[:1], packed, alone, strict=strict)

    assert torch.equal(alone[:, 0], together[:, 0]) == strict
    torch.testing.assert_close(alone[:, 0], together[:, 0], rtol=1e-4, atol=1e-4)
