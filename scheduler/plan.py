"""Values that the scheduler and the step thread exchange. They are frozen, so either side may keep them."""

from dataclasses import dataclass
from typing import Final

PENDING_TOKEN: Final = -1
"""Placeholder for the token that the step in flight samples in the same slot, when the next step is planned before
the result is known."""

_PENDING: Final = (PENDING_TOKEN,)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of a request is chosen. Ranges are checked where jobs are decoded, not here."""

    seed: int
    """64-bit. Seed and absolute position key the counter RNG, so that other rows of the batch never matter."""
    temperature: float = 1.0
    """0 is greedy: only penalties, bias and bans still apply."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    """None: no log-probabilities; k: those of the sampled token and of the k most likely ones."""
    banned_token_ids: tuple[int, ...] = ()
    """Stop ids, which are not sampled until the request has generated `min_tokens`."""
    min_tokens: int = 0
    grammar: str | None = None
    """Grammar that the generated text must match, in a notation that only the runner reads; None: any text."""

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on earlier tokens, not on the logits alone."""
        return self.has_penalties or self.grammar is not None


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """The tokens of one request in one step: `token_ids` at positions num_computed_tokens, +1, …"""

    request_id: str
    slot: int
    """In [0, max_num_seqs), fixed while the request runs. The runner keeps its state of the request under it."""
    token_ids: tuple[int, ...]
    """Known tokens, or a single PENDING_TOKEN."""
    num_computed_tokens: int
    """Tokens whose K/V is in the pool before the step; also the position of token_ids[0]."""
    block_table: tuple[int, ...]
    """Block ids that cover num_computed_tokens + len(token_ids) positions."""
    sampling: SamplingParams | None
    """None: the chunk ends before the last known token, so nothing is sampled."""
    num_generated_tokens: int
    """Output tokens before the one that this row samples; includes those of earlier attempts and a pending one."""
    history: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """(prompt, generated) token ids if `sampling.needs_history`, in the first sampling row after each admission only;
    from then on the runner keeps the history by slot. A pending row never has it."""
    group: str | None = None
    """Rows of one group belong to one job; None: the row is a job of its own."""

    @property
    def sample_position(self) -> int:
        """Absolute position of the token that this row samples."""
        return self.num_computed_tokens + len(self.token_ids)

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters; the row must be one that samples."""
        assert self.sampling is not None, f"request {self.request_id}: this row samples nothing"
        return self.sampling

    @property
    def is_banning(self) -> bool:
        """Whether the banned ids may not be sampled yet."""
        return bool(self.params.banned_token_ids) and self.num_generated_tokens < self.params.min_tokens

    @property
    def is_pending(self) -> bool:
        """Whether its token is still being sampled. A prompt that contains -1 does not make a row pending."""
        return self.token_ids == _PENDING and self.num_generated_tokens > 0 and self.sampling is not None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that the step thread needs for one step."""

    step_id: int
    rows: tuple[ScheduledRow, ...]
    """Decoding rows (one token) first, then prefill chunks."""
    released_slots: tuple[int, ...] = ()
    """Slots whose request left since the previous plan; this plan may use them for other requests already."""
    block_copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) blocks to copy before the step (copy on write)."""
    predicted_s: float | None = None
    """Predicted duration of the step; None: not enough steps were measured."""

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities before temperature and filters."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), most likely first."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """The sampled token of one row, or why it failed."""

    request_id: str
    token_id: int | None = None
    """None: the row sampled nothing or failed."""
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """Why this row failed (NaN or infinite logits, a grammar that cannot be followed); the other rows are valid."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one plan."""

    step_id: int
    rows: tuple[RowResult, ...]
    """One per row of the plan, in its order."""
    step_time_s: float
    """Measured duration of the step."""
