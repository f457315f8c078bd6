"""The Sampler of a model on the GPU: what `kernels.sampling.Sampler` does, with the logits staying where they are."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from kernels.gpu.staging import Staging
from kernels.grammar import GrammarError, Grammars, GrammarSeats
from kernels.ops.sampling.gpu import STATUS_OK, RowParams, Sampled, reset_counts, sample, upload
from kernels.ops.sampling.gpu_kernel import STATUS_BAD_LOGITS
from scheduler.plan import RowResult, SamplingParams, ScheduledRow, TokenLogprobs

GREEDY_BELOW = 1e-5
"""Smaller temperatures are taken as 0: dividing by them overflows."""
_NUM_TOP = 20
"""Always so many are looked up: which of two equal ones is listed must not depend on a neighbour's wish."""

_NO_LOGIT = "the model produced NaN or infinite logits for this row"
_NO_TOKEN = "every token is excluded by logit_bias and banned tokens"


class GpuSampler:
    """Keeps the counts that penalties need, by seat, on the device. Step thread only."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._max_num_seqs = max_num_seqs
        self._device = device
        self._staging = Staging(device)
        self._counts: torch.Tensor | None = None
        self._grammar_seats = GrammarSeats()

    def constrain_with(self, grammars: Grammars) -> None:
        """Before the first row with a grammar; without it such a row ends in an error."""
        self._grammar_seats = GrammarSeats(grammars)

    def release(self, seats: Iterable[int]) -> None:
        """A seat's counts are not freed: its next request writes over them."""
        self._grammar_seats.release(seats)

    def sample(self, logits: torch.Tensor, rows: Sequence[ScheduledRow]) -> list[RowResult]:
        """One result per row of `logits` [num_rows, vocab_size] float32, which stay unchanged.

        Waits for the device once, at the end.
        """
        if not rows:
            return []
        errors = [self._admit(row) for row in rows]
        prepared = [_prepare(row, self._vocab_size, error) for row, error in zip(rows, errors, strict=True)]
        self._constrain(rows, prepared, errors)
        sampled = sample(logits, upload(prepared, self._counts, self._staging))
        wanted = [idx for idx, row in enumerate(rows) if _params(row).num_logprobs is not None]
        top = _top(logits, sampled, rows, wanted) if wanted else None
        packed = torch.stack((sampled.token_ids, sampled.statuses)).cpu().tolist()
        logprobs = _listed(top, rows, wanted) if top is not None else {}
        return [
            _result(row, packed[0][idx], packed[1][idx], errors[idx], logprobs.get(idx))
            for idx, row in enumerate(rows)
        ]

    def _constrain(
        self, rows: Sequence[ScheduledRow], prepared: list[RowParams], errors: list[str | None]
    ) -> None:
        """Puts the masks of the rows that have a grammar into `prepared`, or why there is none into `errors`."""
        for idx, row in enumerate(rows):
            params = _params(row)
            if params.grammar is None or errors[idx] is not None:
                continue
            try:
                mask = self._grammar_seats.mask(row)
            except GrammarError as error:
                errors[idx] = str(error)
                continue
            bias = prepared[idx].bias
            if _is_banning(row) and mask.is_within(params.banned_token_ids):
                # A complete text can only end, however many tokens were wished for.
                bias = dict(params.logit_bias)
            prepared[idx] = replace(prepared[idx], bias=bias, allowed=mask.words)

    def _admit(self, row: ScheduledRow) -> str | None:
        """Take over a history that comes with the row; the error that ends this row, if any."""
        params = _params(row)
        error = _outside("logit_bias", (token_id for token_id, _ in params.logit_bias), self._vocab_size)
        if error is None and params.has_penalties and row.history is not None:
            prompt, generated = row.history
            error = _outside("history", (*prompt, *generated), self._vocab_size)
            if error is None:
                reset_counts(self._all_counts(), row.seat, prompt, generated)
        return error

    def _all_counts(self) -> torch.Tensor:
        if (
            self._counts is None
        ):  # most deployments never see a penalty, and this is vocab_size * 4 bytes per seat
            shape = (self._max_num_seqs, self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._counts


def _params(row: ScheduledRow) -> SamplingParams:
    assert row.sampling is not None, (
        f"request {row.request_id}: a row that samples nothing reached the sampler"
    )
    return row.sampling


def _outside(field: str, token_ids: Iterable[int], vocab_size: int) -> str | None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            return f"{field} names token {token_id}; the vocabulary has {vocab_size} tokens"
    return None


def _is_banning(row: ScheduledRow) -> bool:
    params = _params(row)
    return bool(params.banned_token_ids) and row.num_generated_tokens < params.min_tokens


def _prepare(row: ScheduledRow, vocab_size: int, error: str | None) -> RowParams:
    params = _params(row)
    bias = dict(params.logit_bias) if error is None else {}
    if _is_banning(row):
        bias.update(
            (token_id, -torch.inf) for token_id in params.banned_token_ids if 0 <= token_id < vocab_size
        )
    return RowParams(
        parameters=(
            params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        ),
        top_k=params.top_k if params.top_k < vocab_size else 0,
        seed=params.seed,
        position=row.sample_position,
        seat=row.seat if params.has_penalties and error is None else -1,
        bias=bias,
    )


def _top(
    logits: torch.Tensor, sampled: Sampled, rows: Sequence[ScheduledRow], wanted: Sequence[int]
) -> list[torch.Tensor]:
    """For the wanted rows, on the host: chosen log-probabilities, the largest ones and their ids."""
    at = torch.tensor(wanted, device=logits.device)
    raw = logits[at]
    most = max(_NUM_TOP, *(_params(rows[idx]).num_logprobs or 0 for idx in wanted))
    values, ids = raw.topk(min(most, raw.shape[1]), dim=1)
    # The kernel's normalizer is what makes the chosen token's value consistent with the listed ones.
    chosen = sampled.logprobs[at]
    normalizer = raw.gather(1, sampled.token_ids[at].long().unsqueeze(1)) - chosen.unsqueeze(1)
    return [chosen.cpu(), (values - normalizer).cpu(), ids.cpu()]


def _listed(
    top: Sequence[torch.Tensor], rows: Sequence[ScheduledRow], wanted: Sequence[int]
) -> dict[int, TokenLogprobs]:
    chosen, values, ids = (tensor.tolist() for tensor in top)
    result = {}
    for line, idx in enumerate(wanted):
        count = _params(rows[idx]).num_logprobs or 0
        ordered = sorted(zip(ids[line], values[line], strict=True), key=lambda pair: (-pair[1], pair[0]))
        result[idx] = TokenLogprobs(chosen[line], tuple(ordered[:count]))
    return result


def _result(
    row: ScheduledRow, token_id: int, status: int, error: str | None, logprobs: TokenLogprobs | None
) -> RowResult:
    if status == STATUS_BAD_LOGITS:
        return RowResult(row.request_id, error=_NO_LOGIT)
    if error is not None or status != STATUS_OK:
        return RowResult(row.request_id, error=error or _NO_TOKEN)
    return RowResult(row.request_id, token_id=token_id, logprobs=logprobs)
