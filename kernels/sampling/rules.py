"""Rules that both samplers share: limits, messages, and which tokens a row excludes. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kernels.grammar import GrammarError, GrammarSlots, TokenMask
from scheduler.plan import ScheduledRow

GREEDY_BELOW: Final = 1e-5
"""Smaller temperatures are taken as 0: dividing by them overflows."""
NUM_TOP: Final = 20
"""Always so many log-probabilities are looked up: which of two equal ones is listed must not depend on another row."""

NO_LOGIT: Final = "the model produced NaN or infinite logits for this row"
NO_TOKEN: Final = "every token is excluded by logit_bias and banned tokens"


def outside(field: str, token_ids: Iterable[int], vocab_size: int) -> str | None:
    """An error that names the first id of `field` outside the vocabulary; None if there is none."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            return f"{field} names token {token_id}; the vocabulary has {vocab_size} tokens"
    return None


@dataclass(frozen=True, slots=True)
class Rule:
    """Which tokens are excluded from a row altogether."""

    bans: bool
    """The row's banned ids are excluded."""
    allowed: TokenMask | None = None
    """The tokens that the row's grammar allows. None: it has no grammar."""
    error: str | None = None


def rule_of(row: ScheduledRow, grammar_slots: GrammarSlots, error: str | None) -> Rule:
    """The row's rule. If it already has an `error`, its grammar is not evaluated."""
    params = row.params
    if params.grammar is None or error is not None:
        return Rule(row.is_banning, error=error)
    try:
        allowed = grammar_slots.mask(row)
    except GrammarError as grammar_error:
        return Rule(row.is_banning, error=str(grammar_error))
    # A complete text can only end, however many tokens were asked for.
    return Rule(row.is_banning and not allowed.is_within(params.banned_token_ids), allowed)
