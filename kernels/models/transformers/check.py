"""Checks that an adapted model gives the same logits in a batch as with its own attention and one prompt at a time."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kernels.batch import ForwardBatch
from kernels.errors import ModelFileError
from kernels.models.transformers.adapter import AdapterModel

_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Relative error of the logits. Ignoring other rows, positions or windows gives errors of the order of one.

Rounding gave SmolLM2 and Gemma 3 270M up to 6e-5 in float32 and 0.04 in bfloat16.
"""

BLOCK_SIZE = 16
NUM_BLOCKS = 2
"""The size of the pool that the check needs."""
_PROMPTS = ((1, 5, 2, 7, 3, 6, 2, 9, 4, 8, 5), (4, 3, 3, 8, 1, 6))
"""Small ids, which every vocabulary has. Each fits one block."""


@dataclass(frozen=True, slots=True)
class _Row:
    block: int
    tokens: tuple[int, ...]
    num_before: int
    """Tokens of this prompt that are already in the block."""
    first_position: int
    """The position of the prompt's first token."""


@torch.inference_mode()
def own_logits(model: PreTrainedModel, max_positions: int) -> torch.Tensor:
    """Return float32 [len(_PROMPTS), vocab_size]: logits after each prompt, alone, with the model's own attention."""
    logits = []
    for prompt, first in zip(_PROMPTS, _first_positions(max_positions), strict=True):
        tokens = torch.tensor([prompt], device=model.device)
        positions = torch.arange(first, first + len(prompt), device=model.device).unsqueeze(0)
        output = model(input_ids=tokens, position_ids=positions, use_cache=False)
        logits.append(output.logits[:, -1].float())
    return torch.cat(logits)


def check_logits(folder: Path, adapted: AdapterModel, model: PreTrainedModel, expected: torch.Tensor) -> None:
    """Compute the first prompt in chunks of seven, three and one tokens, the first chunk beside the second prompt.

    The second prompt has the last positions that the model allows, so that an effect of one row on another's rotation
    shows. expected: float32 [2, vocab_size], from own_logits. Raises ModelFileError with the largest difference.
    """
    first, second = _PROMPTS
    start, end = _first_positions(adapted.config.max_position_embeddings)
    steps = [
        [_Row(0, first[:7], 0, start), _Row(1, second, 0, end)],
        [_Row(0, first[7:10], 7, start)],
        [_Row(0, first[10:], 10, start)],
    ]
    logits = [adapted.forward(_batch(rows, model.device)) for rows in steps]
    found = torch.stack([logits[2][0], logits[0][1]])
    off_by = float((found - expected).norm() / expected.norm())
    limit = _TOLERANCES[model.dtype]
    if not off_by <= limit:
        largest = float((found - expected).abs().max())
        raise ModelFileError(
            f"{folder}: {type(model).__name__} mixes tokens otherwise than by causal softmax attention: in a batch "
            f"its logits are off by up to {largest:.2g}, {off_by:.2g} of their size (limit {limit:g})"
        )


def _first_positions(max_positions: int) -> tuple[int, int]:
    return 0, max(0, max_positions - len(_PROMPTS[1]))


def _batch(rows: list[_Row], device: torch.device) -> ForwardBatch:
    """A batch that asks for the logits after each row."""
    starts = torch.tensor([0, *(len(row.tokens) for row in rows)]).cumsum(0)
    offsets = torch.cat([torch.arange(row.num_before, row.num_before + len(row.tokens)) for row in rows])
    blocks = torch.cat([torch.full((len(row.tokens),), row.block) for row in rows])
    firsts = torch.cat([torch.full((len(row.tokens),), row.first_position) for row in rows])
    tensors = {
        "token_ids": torch.tensor([token for row in rows for token in row.tokens]),
        "positions": firsts + offsets,
        "slot_mapping": blocks * BLOCK_SIZE + offsets,
        "block_tables": torch.tensor([[row.block] for row in rows], dtype=torch.int32),
        "query_start": starts.int(),
        "context_lens": torch.tensor([row.num_before + len(row.tokens) for row in rows], dtype=torch.int32),
        "sample_indices": starts[1:] - 1,
    }
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    return ForwardBatch(**on_device, num_decode_rows=int(len(rows[0].tokens) == 1))
