"""A Runner without a model, for tests and for the lab: tokens are a hash of the tokens before them.

It uses the KV pool as a model does. Each token's place in the pool holds the hash state after
the token stored there, and a row continues from the state that it finds through its block table, as attention
would. Hence the same prompt gives the same text whatever is batched beside it, and after preemption, prefix
hits, copied blocks or a move to another worker; a wrong block, one freed too early or one never written gives
an AssertionError or a different text. This module imports no torch.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kernels.grammar import GrammarError, Grammars, GrammarSlots
from kernels.runner import FinishedStep
from kernels.runtime.running_step import LastTokens
from kernels.sampling.rules import NO_LOGIT
from scheduler.plan import RowResult, ScheduledRow, StepPlan, StepResult, TokenLogprobs

EOS_TOKEN_ID = 256
VOCAB_SIZE = 257
"""Ids 0 to 255 are bytes."""

_MASK = 0xFFFFFFFFFFFFFFFF
_START = 0x243F6A8885A308D3
_POISONED = 0xFFFFFFFFFFFFFFFF
_UNWRITTEN = 0
_LETTERS = b"etaoinshrdlucmfwypvbgkjqxz"


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step takes, in seconds. All zero: only as long as the arithmetic takes."""

    step_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_row_s: float = 0.0

    def of(self, plan: StepPlan) -> float:
        decode_rows = sum(len(row.token_ids) == 1 for row in plan.rows)
        return (
            self.step_s
            + self.prefill_token_s * (plan.num_tokens - decode_rows)
            + self.decode_row_s * decode_rows
        )


@dataclass(frozen=True, slots=True)
class DeterministicOptions:
    num_blocks: int
    block_size: int
    max_model_len: int | None
    """None: as long as the pool."""
    step_time: StepTime = StepTime()
    eos_one_in: int = 0
    """One token in this many is the end of sequence, on average. 0: none, and outputs have their full length."""
    poison_token_id: int | None = None
    """This token poisons a request's state as a NaN would: it spreads to all later tokens of the request, whose
    sampling rows then end in an error. Rows of other requests do not. None: off."""


class DeterministicRunner:
    """Built anywhere, then used on the step thread only. The step thread sleeps for what StepTime asks."""

    def __init__(self, options: DeterministicOptions) -> None:
        self._options = options
        self.block_size = options.block_size
        self.num_blocks = options.num_blocks
        self.vocab_size = VOCAB_SIZE
        self.prefers_lookahead = False
        self.eos_token_ids = (EOS_TOKEN_ID,)
        self.max_model_len = options.max_model_len or options.num_blocks * options.block_size
        num_slots = options.num_blocks * options.block_size
        self._after = array("Q", [_UNWRITTEN]) * num_slots
        self._before = array("Q", [_UNWRITTEN]) * options.num_blocks
        self._grammar_slots = GrammarSlots()
        self._last_tokens = LastTokens()

    def constrain_with(self, grammars: Grammars) -> None:
        self._grammar_slots = GrammarSlots(grammars)

    def warmup(self) -> None:
        pass

    def begin(self, plan: StepPlan) -> FinishedStep:
        started_s = time.perf_counter()
        self._grammar_slots.release(plan.released_slots)
        self._last_tokens.release(plan.released_slots)
        for source, destination in plan.block_copies:
            self._copy_block(source, destination)
        errors = self._last_tokens.resolve(plan.rows).errors
        results = tuple(
            RowResult(row.request_id, error=errors[idx])
            if idx in errors
            else self._run(self._last_tokens.known(row))
            for idx, row in enumerate(plan.rows)
        )
        sampled = [row for row in plan.rows if row.sampling is not None]
        self._last_tokens.expect(plan.step_id, sampled)
        self._last_tokens.keep(plan.step_id, plan.rows, results)
        remaining_s = self._options.step_time.of(plan) - (time.perf_counter() - started_s)
        if remaining_s > 0:
            time.sleep(remaining_s)
        return FinishedStep(StepResult(plan.step_id, results, time.perf_counter() - started_s))

    def step(self, plan: StepPlan) -> StepResult:
        return self.begin(plan).wait()

    def _copy_block(self, source: int, destination: int) -> None:
        size = self.block_size
        self._before[destination] = self._before[source]
        self._after[destination * size : (destination + 1) * size] = self._after[
            source * size : (source + 1) * size
        ]

    def _run(self, row: ScheduledRow) -> RowResult:
        state = self._read_context(row)
        for position, token_id in enumerate(row.token_ids, start=row.num_computed_tokens):
            if not 0 <= token_id < VOCAB_SIZE:
                return RowResult(
                    row.request_id, error=f"token {token_id} is outside the vocabulary of {VOCAB_SIZE} tokens"
                )
            block_id, offset = row.block_table[position // self.block_size], position % self.block_size
            if offset == 0:
                self._before[block_id] = state
            state = advance(state, _POISONED if token_id == self._options.poison_token_id else token_id)
            self._after[block_id * self.block_size + offset] = state
        if row.sampling is None:
            return RowResult(row.request_id)
        if state == _POISONED:
            return RowResult(row.request_id, error=NO_LOGIT)
        return self._sample(row, state)

    def _read_context(self, row: ScheduledRow) -> int:
        """The state before the row's first token; each block of the context must continue the one before."""
        state, remaining = _START, row.num_computed_tokens
        for block_id in row.block_table:
            if remaining <= 0:
                break
            assert self._before[block_id] == state, (
                f"request {row.request_id}: block {block_id} does not continue the context before it"
            )
            state = self._after[block_id * self.block_size + min(remaining, self.block_size) - 1]
            remaining -= self.block_size
        assert remaining <= 0, (
            f"request {row.request_id}: the block table is shorter than num_computed_tokens"
        )
        return state

    def _sample(self, row: ScheduledRow, state: int) -> RowResult:
        sampling = row.sampling
        assert sampling is not None
        banned = sampling.banned_token_ids if row.num_generated_tokens < sampling.min_tokens else ()
        if sampling.grammar is None:
            token_id = emit(state, self._options.eos_one_in, banned)
        else:
            try:
                token_id = emit_among(
                    state, self._grammar_slots.mask(row).unpacked().nonzero()[0].tolist(), banned
                )
            except GrammarError as error:
                return RowResult(row.request_id, error=str(error))
        logprobs = None if sampling.num_logprobs is None else _certain(token_id, sampling.num_logprobs)
        return RowResult(row.request_id, token_id=token_id, logprobs=logprobs)


def advance(state: int, token_id: int) -> int:
    """Return the state after one more token: mix the token in and take a step of SplitMix64. Poison stays."""
    if _POISONED in (state, token_id):
        return _POISONED
    mixed = (state ^ ((token_id + 1) * 0x9E3779B97F4A7C15)) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    mixed ^= mixed >> 31
    return mixed if mixed not in (_UNWRITTEN, _POISONED) else _START


def emit(state: int, eos_one_in: int = 0, banned: Sequence[int] = ()) -> int:
    """Return the token that follows: lower-case letters in words of about five, or now and then the end."""
    if eos_one_in and EOS_TOKEN_ID not in banned and (state >> 32) % eos_one_in == 0:
        return EOS_TOKEN_ID
    if state % 6 == 0 and ord(" ") not in banned:
        return ord(" ")
    first = (state >> 8) % len(_LETTERS)
    letters = (_LETTERS[(first + step) % len(_LETTERS)] for step in range(len(_LETTERS)))
    return next((letter for letter in letters if letter not in banned), ord("."))


def emit_among(state: int, allowed: Sequence[int], banned: Sequence[int] = ()) -> int:
    """Return the token that follows under a grammar, given the allowed ids in ascending order.

    It ends as soon as it may and prefers printable ASCII. Half of the choices close a bracket or a
    string where one may be closed, so that any grammar ends.
    """
    allowed = [token_id for token_id in allowed if token_id not in banned] or allowed
    if EOS_TOKEN_ID in allowed:
        return EOS_TOKEN_ID
    closing = [token_id for token_id in allowed if token_id in b'"]}']
    if closing and state & 1:
        return closing[0]
    choices = [token_id for token_id in allowed if 0x20 < token_id < 0x7F] or allowed
    return choices[(state >> 8) % len(choices)]


def expected_tokens(
    prompt_token_ids: Sequence[int], num_tokens: int, *, eos_one_in: int = 0
) -> tuple[int, ...]:
    """The tokens that a request without bans must generate, computed without blocks; stops at an end of sequence."""
    state = _START
    for token_id in prompt_token_ids:
        state = advance(state, token_id)
    tokens: list[int] = []
    while len(tokens) < num_tokens and (not tokens or tokens[-1] != EOS_TOKEN_ID):
        tokens.append(emit(state, eos_one_in))
        state = advance(state, tokens[-1])
    return tuple(tokens)


def _certain(token_id: int, num_logprobs: int) -> TokenLogprobs:
    """The distribution has all its mass on one token."""
    return TokenLogprobs(0.0, ((token_id, 0.0),) if num_logprobs else ())
