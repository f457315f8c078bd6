"""Chooses one token for each sampled row. Step thread only.

Determinism: a row's token is a function of its logits, its sampling parameters, its own history and (seed,
position). Neither the number nor the order of other rows matters; the tests compare bit for bit.
Whether the *logits* depend on the batch is up to the model.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.grammar import Grammars, GrammarSlots
from kernels.runtime.running_step import FinishedSample
from kernels.sampling.cpu.draw import DrawParams, draw, span_sums, uniform
from kernels.sampling.cpu.slot import Slot, adjust
from kernels.sampling.rules import GREEDY_BELOW, NO_LOGIT, NO_TOKEN, NUM_TOP, Rule, rule_of
from scheduler.plan import RowResult, SamplingParams, ScheduledRow, TokenLogprobs

_MAX_ROWS_AT_ONCE = 16
"""Rows that need more than an argmax are copied and processed in groups, which bounds memory and stays in cache."""


class Sampler:
    """Keeps the state that penalties and grammars need by slot; everything else comes with the row."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._slots: dict[int, Slot] = {}
        self._grammar_slots = GrammarSlots()
        self._scratch = torch.empty((0, vocab_size))

    def constrain_with(self, grammars: Grammars) -> None:
        """Call before the first row with a grammar; without it such a row ends in an error."""
        self._grammar_slots = GrammarSlots(grammars)

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)
        self._grammar_slots.release(slots)

    def warmup(self, logits: torch.Tensor) -> None:
        """Touch what filters and log-probabilities need, with float32 logits [1, vocab_size]."""
        sampling = SamplingParams(seed=0, top_p=0.9, num_logprobs=1)
        self.sample(logits, [ScheduledRow("warmup", 0, (0,), 0, (0,), sampling, 0)])

    def prepare(self, rows: Sequence[ScheduledRow]) -> None:
        """Do nothing: there is nothing to upload."""

    def start(self, logits: torch.Tensor, rows: Sequence[ScheduledRow]) -> FinishedSample:
        """Sample from float32 logits [num_rows, vocab_size], in the form shared with samplers on a device."""
        return FinishedSample(self.sample(logits, rows))

    def sample(self, logits: torch.Tensor, rows: Sequence[ScheduledRow]) -> list[RowResult]:
        """Return one result per row of `logits` [num_rows, vocab_size] float32 on the CPU, which stays unchanged."""
        if not rows:
            return []
        values = logits.numpy()
        token_ids = values.argmax(axis=1)
        best = values[np.arange(len(rows)), token_ids].astype(np.float64)
        finite = np.isfinite(best).tolist()
        results = [
            RowResult(row.request_id, token_id=token_id)
            if good
            else RowResult(row.request_id, error=NO_LOGIT)
            for row, token_id, good in zip(rows, token_ids.tolist(), finite, strict=True)
        ]
        special = [idx for idx, row in enumerate(rows) if finite[idx] and not _is_plain_greedy(row)]
        for start in range(0, len(special), _MAX_ROWS_AT_ONCE):
            group = special[start : start + _MAX_ROWS_AT_ONCE]
            for idx, result in zip(group, self._sample_group(logits, best, rows, group), strict=True):
                results[idx] = result
        return results

    def _sample_group(
        self,
        logits: torch.Tensor,
        raw_best: npt.NDArray[np.float64],
        rows: Sequence[ScheduledRow],
        group: Sequence[int],
    ) -> list[RowResult]:
        chosen = [rows[idx] for idx in group]
        slots = [self._slot(row) for row in chosen]
        rules = [
            rule_of(row, self._grammar_slots, slot.error) for row, slot in zip(chosen, slots, strict=True)
        ]
        scratch = self._copy_rows(logits, group)
        token_ids, errors = _choose(scratch, chosen, slots, rules)
        logprobs = self._logprobs(logits, raw_best, group, chosen, token_ids)
        return [
            RowResult(row.request_id, error=errors[i])
            if errors[i]
            else RowResult(row.request_id, token_id=int(token_ids[i]), logprobs=logprobs.get(i))
            for i, row in enumerate(chosen)
        ]

    def _slot(self, row: ScheduledRow) -> Slot:
        params = row.params
        slot = self._slots.get(row.slot)
        if (
            slot is None
            or row.history is not None
            or not (slot.sampling is params or slot.sampling == params)
        ):
            slot = self._slots[row.slot] = Slot(params, self._vocab_size)
        if row.history is not None and params.has_penalties:
            slot.load_history(row.history, self._vocab_size)
        assert slot.counts is not None or slot.error or not params.has_penalties, (
            f"request {row.request_id}: penalties without history in the first sampling row"
        )
        slot.catch_up(row)
        return slot

    def _copy_rows(self, logits: torch.Tensor, group: Sequence[int]) -> torch.Tensor:
        """Copy rows into memory that is kept: page faults in new memory would cost more than the copy."""
        if self._scratch.shape[0] < len(group):
            self._scratch = torch.empty((len(group), self._vocab_size))
        scratch = self._scratch[: len(group)]
        torch.index_select(logits, 0, torch.tensor(group), out=scratch)
        return scratch

    def _logprobs(
        self,
        logits: torch.Tensor,
        best: npt.NDArray[np.float64],
        group: Sequence[int],
        chosen: Sequence[ScheduledRow],
        token_ids: npt.NDArray[np.int64],
    ) -> dict[int, TokenLogprobs]:
        """Return log-probabilities of the rows that asked for them, by index into the group."""
        wanted = [
            (i, count) for i, row in enumerate(chosen) if (count := row.params.num_logprobs) is not None
        ]
        if not wanted:
            return {}
        indices = [i for i, _ in wanted]
        at = [group[i] for i in indices]
        found = _token_logprobs(
            self._copy_rows(logits, at), best[at], token_ids[indices].tolist(), [count for _, count in wanted]
        )
        return dict(zip(indices, found, strict=True))


def _is_plain_greedy(row: ScheduledRow) -> bool:
    """Return whether the row's token is the argmax of the raw logits."""
    params = row.params
    return (
        params.temperature < GREEDY_BELOW
        and params.num_logprobs is None
        and not params.logit_bias
        and not params.needs_history
        and not row.is_banning
    )


def _choose(
    logits: torch.Tensor, rows: Sequence[ScheduledRow], slots: Sequence[Slot], rules: Sequence[Rule]
) -> tuple[npt.NDArray[np.int64], list[str | None]]:
    """Return a token and an error, if any, for each row; `logits` is overwritten."""
    values = logits.numpy()
    usable = [
        i for i, rule in enumerate(rules) if rule.error is None
    ]  # The ids of the other rows may be out of range.
    adjust(values, [(i, slots[i]) for i in usable], [rules[i].bans for i in usable])
    for i, rule in enumerate(rules):
        if rule.allowed is not None:
            np.minimum(values[i], rule.allowed.ceiling(), out=values[i])
    token_ids = values.argmax(axis=1)
    best = values[np.arange(len(rows)), token_ids].astype(np.float64)
    errors = [
        rule.error or (None if possible else NO_TOKEN)
        for rule, possible in zip(rules, np.isfinite(best).tolist(), strict=True)
    ]
    drawn = [i for i, row in enumerate(rows) if not errors[i] and row.params.temperature >= GREEDY_BELOW]
    if drawn:
        picked = logits if len(drawn) == len(rows) else logits[torch.tensor(drawn)]
        token_ids[drawn] = draw(picked, best[drawn], _draw_params([rows[i] for i in drawn]))
    return token_ids, errors


def _draw_params(rows: Sequence[ScheduledRow]) -> DrawParams:
    params = [row.params for row in rows]
    return DrawParams(
        temperature=np.array([p.temperature for p in params], dtype=np.float64),
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        uniform=uniform([p.seed for p in params], [row.sample_position for row in rows]),
    )


def _token_logprobs(
    logits: torch.Tensor, best: npt.NDArray[np.float64], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return one entry per row of `logits` [num_rows, vocab_size] float32, which is overwritten."""
    logits.sub_(torch.from_numpy(best.astype(np.float32)).unsqueeze(1))
    top = logits.topk(min(max(NUM_TOP, *num_top), logits.shape[1]), dim=1)
    top_values, top_ids = top.values.numpy().astype(np.float64), top.indices.numpy()
    sampled = logits.numpy()[np.arange(len(token_ids)), token_ids].astype(np.float64)
    log_mass = np.log(span_sums(logits.exp_()).sum(axis=1))
    results = []
    for row, count in enumerate(num_top):
        order = np.lexsort((top_ids[row], -top_values[row]))[:count]
        listed = zip(
            top_ids[row][order].tolist(), (top_values[row][order] - log_mass[row]).tolist(), strict=True
        )
        results.append(TokenLogprobs(float(sampled[row] - log_mass[row]), tuple(listed)))
    return results
