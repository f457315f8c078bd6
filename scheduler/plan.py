"""Value types between the scheduler and the step thread. Frozen: either side may keep them."""

from dataclasses import dataclass
from typing import Final

PENDING_TOKEN: Final = -1
"""Stands for the token that the plan before samples at the same seat: this plan was made while that one ran."""

_PENDING: Final = (PENDING_TOKEN,)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's next token is chosen. Ranges are checked where jobs are decoded, not here."""

    seed: int
    """64-bit; with the token's absolute position it keys the counter RNG, so neighbours never matter."""
    temperature: float = 1.0
    """0 is greedy; everything below except penalties, bias and bans is then ignored."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    """None: no log-probabilities. k: the sampled token's and the k most likely ones'."""
    banned_token_ids: tuple[int, ...] = ()
    """Never sampled while the request has generated fewer than `min_tokens` (its stop ids)."""
    min_tokens: int = 0
    grammar: str | None = None
    """What the generated text must match, in a notation that only the runner reads. None: anything."""

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def needs_history(self) -> bool:
        return self.has_penalties or self.grammar is not None


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's share of one step: compute `token_ids` at positions num_computed_tokens, +1, …"""

    request_id: str
    seat: int
    """In [0, max_num_seqs); fixed while the request runs. What the runner keeps per request lives here."""
    token_ids: tuple[int, ...]
    """Known ones, or nothing but PENDING_TOKEN."""
    num_computed_tokens: int
    """Tokens whose K/V is already in the pool: the position of token_ids[0]."""
    block_table: tuple[int, ...]
    """Block ids covering num_computed_tokens + len(token_ids) positions."""
    sampling: SamplingParams | None
    """None: the chunk ends before the last known token and nothing is sampled."""
    num_generated_tokens: int
    """Output tokens before the one that this row samples, those of earlier attempts and a pending one included."""
    history: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """(prompt, generated) ids, in the first sampling row after each admission of a request whose
    sampling.needs_history; afterwards the runner keeps what it needs of it itself, by seat. Never in a pending row."""
    group: str | None = None
    """Rows of one group are of one job. None: a job of its own."""

    @property
    def sample_position(self) -> int:
        """Absolute position of the token that this row samples."""
        return self.num_computed_tokens + len(self.token_ids)

    @property
    def params(self) -> SamplingParams:
        """Of a row that samples."""
        assert self.sampling is not None, f"request {self.request_id}: this row samples nothing"
        return self.sampling

    @property
    def is_banning(self) -> bool:
        """Too few tokens were generated for one of the banned ids to come."""
        return bool(self.params.banned_token_ids) and self.num_generated_tokens < self.params.min_tokens

    @property
    def is_pending(self) -> bool:
        """Its one token is still being sampled. A prompt may contain the same number, and that is the job's error."""
        return self.token_ids == _PENDING and self.num_generated_tokens > 0 and self.sampling is not None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that the step thread needs for one step."""

    step_id: int
    rows: tuple[ScheduledRow, ...]
    """Decoding rows (one token) first, then prefill chunks."""
    released_seats: tuple[int, ...] = ()
    """Seats whose request left since the previous plan; one may already be taken again in this plan."""
    block_copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) blocks to copy before the step, for copy on write."""
    predicted_s: float | None = None

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
    request_id: str
    token_id: int | None = None
    """None when the row sampled nothing or failed."""
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """This row alone failed (NaN or infinite logits, a grammar that cannot be followed); its neighbours are good."""


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    rows: tuple[RowResult, ...]
    """In the plan's order, one per row."""
    step_time_s: float
