"""The Triton kernel that samples: one program per row, no sort, no host sync, one random number per row.

The order is that of `kernels.sampling.cpu`: bias, penalties, temperature, min-p, top-k, top-p over what is left, then
the inverse of the cumulative distribution in vocabulary order. Each filter is one number, the smallest kept weight,
found by bisection over the bits of the weight, which order like the weights since none is negative. The weights are
stored once; each round reads them from L2. Partial sums stay per lane and are reduced once after the loop: a reduction
in each round would serialize the rounds.
"""

# ruff: noqa: N803, N806  compile-time parameters are upper case, as everywhere in Triton

import triton.language as tl

from kernels.ops.gpu.jit import device_function, kernel

STATUS_OK, STATUS_BAD_LOGITS, STATUS_NO_TOKEN = 0, 1, 2

# Columns of the float64 parameter table, which has one line per row.
PARAMETERS = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")


@kernel("bias_start", "bias_ids", "bias")
def _bias_kernel(
    logits: tl.tensor,
    bias_start: tl.tensor,
    bias_ids: tl.tensor,
    bias: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(bias_start + row + 1)
    for start in range(tl.load(bias_start + row), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < end
        to = logits + row * VOCAB + tl.load(bias_ids + at, mask=mask, other=0)
        value = tl.load(to, mask=mask, other=0.0) + tl.load(bias + at, mask=mask, other=0.0)
        tl.store(to, value, mask=mask)


@device_function
def _store_weights(
    logits: tl.tensor,
    row: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store exp((logit - best) / temperature) in `row`, possibly over the logits; the likeliest token gets 1."""
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf"))
        weight = tl.exp(tl.div_rn(logit - best, temperature + tl.zeros_like(logit)))
        tl.store(row + ids, weight, mask=ids < VOCAB)


@device_function
def _count_at_least(
    row: tl.tensor, floor_bits: tl.tensor, VOCAB: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """How many weights reach the floor."""
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        weight = tl.load(row + ids, mask=ids < VOCAB, other=0.0)
        counts += ((weight.to(tl.int32, bitcast=True) >= floor_bits) & (ids < VOCAB)).to(tl.int32)
    return tl.sum(counts, axis=0)


@device_function
def _at_least(row: tl.tensor, floor_bits: tl.tensor, VOCAB: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """How many weights reach the floor, and their sum."""
    counts = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.float64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        weight = tl.load(row + ids, mask=ids < VOCAB, other=0.0)
        kept = (weight.to(tl.int32, bitcast=True) >= floor_bits) & (ids < VOCAB)
        counts += kept.to(tl.int32)
        masses += tl.where(kept, weight, 0.0).to(tl.float64)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@device_function
def _top_k_floor(row: tl.tensor, top_k: tl.tensor, VOCAB: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Bits of a weight that exactly the top_k largest reach, or of the top_k-th itself if others equal it."""
    low = tl.zeros([], tl.int32)
    high = tl.full([], 0x3F800001, tl.int32)  # Just above 1.0.
    count_low = tl.full([], VOCAB, tl.int32)
    while (high - low > 1) & (count_low != top_k):
        middle = (low + high) // 2
        count = _count_at_least(row, middle, VOCAB, BLOCK)
        if count >= top_k:
            low = middle
            count_low = count
        else:
            high = middle
    return low


@device_function
def _top_p_floor(
    row: tl.tensor,
    floor: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Bits of the largest weight such that weights not below it hold top_p of the mass that reaches `floor`."""
    count_low, total = _at_least(row, floor, VOCAB, BLOCK)
    if (top_k > 0) & (count_low > top_k):
        # Equal weights at top-k's edge are all kept, but only as many as top_k allows count as mass.
        total -= (count_low - top_k).to(tl.float64) * floor.to(tl.float32, bitcast=True).to(tl.float64)
    wanted = top_p * total
    low = floor
    high = tl.full([], 0x3F800001, tl.int32)
    count_high = tl.zeros([], tl.int32)
    while (high - low > 1) & (count_low - count_high != 1):
        middle = (low + high) // 2
        count, mass = _at_least(row, middle, VOCAB, BLOCK)
        if mass >= wanted:
            low = middle
            count_low = count
        else:
            high = middle
            count_high = count
    return low


@device_function
def _span_sums(
    row: tl.tensor,
    start: tl.tensor,
    floor: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
) -> tl.tensor:
    """Kept weights summed over spans of the tile at `start`, [BLOCK / SPAN] float64."""
    spans = tl.arange(0, BLOCK // SPAN)
    ids = start + spans[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    weight = tl.load(row + ids, mask=ids < VOCAB, other=0.0)
    kept = tl.where(weight.to(tl.int32, bitcast=True) >= floor, weight, 0.0)
    return tl.sum(kept, axis=1).to(tl.float64)


@device_function
def _invert(
    row: tl.tensor,
    floor: tl.tensor,
    uniform: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
) -> tl.tensor:
    """The first id whose cumulative weight exceeds uniform * total; where rounding leaves none, the last one kept."""
    total = tl.zeros([], tl.float64)
    for start in range(0, VOCAB, BLOCK):
        total += tl.sum(_span_sums(row, start, floor, VOCAB, BLOCK, SPAN), axis=0)
    target = uniform * total
    spans = tl.arange(0, BLOCK // SPAN)
    running = tl.zeros([], tl.float64)
    before = tl.zeros([], tl.float64)
    span = tl.zeros([], tl.int32)
    last_kept = tl.zeros([], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        sums = _span_sums(row, start, floor, VOCAB, BLOCK, SPAN)
        cumulative = running + tl.cumsum(sums, axis=0)
        passed = (cumulative <= target) & (start + spans * SPAN < VOCAB)
        span += tl.sum(passed.to(tl.int32), axis=0)
        before = tl.maximum(before, tl.max(tl.where(passed, cumulative, 0.0), axis=0))
        kept = tl.where(sums > 0, start // SPAN + spans, 0)
        last_kept = tl.maximum(last_kept, tl.max(kept, axis=0))
        running += tl.sum(sums, axis=0)
    remaining = tl.where(span > last_kept, float("inf"), target - before)
    span = tl.minimum(span, last_kept)
    lanes = tl.arange(0, SPAN)
    ids = span * SPAN + lanes
    weight = tl.load(row + ids, mask=ids < VOCAB, other=0.0)
    weight = tl.where(weight.to(tl.int32, bitcast=True) >= floor, weight, 0.0)
    first = tl.sum((tl.cumsum(weight.to(tl.float64), axis=0) <= remaining).to(tl.int32), axis=0)
    last = tl.max(tl.where(weight > 0, lanes, 0), axis=0)
    return span * SPAN + tl.minimum(first, last)


@device_function
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """53 random bits in [0, 1), a function of (seed, position) alone."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    first, second, _, _ = tl.philox(seed.to(tl.uint64, bitcast=True), low, high, zero, zero)
    bits = ((first.to(tl.uint64) << 32) | second.to(tl.uint64)) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@kernel()
def _sample_kernel(
    raw: tl.tensor,
    work: tl.tensor,
    parameters: tl.tensor,
    top_ks: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    ring: tl.tensor,
    counted_slots: tl.tensor,
    counts: tl.tensor,
    allowed_lines: tl.tensor,
    allowed: tl.tensor,
    token_ids: tl.tensor,
    statuses: tl.tensor,
    logprobs: tl.tensor,
    allowed_words: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    RING: tl.constexpr,
    HAS_ADJUSTED: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
) -> None:
    line = tl.program_id(0)
    raw_row = raw + line.to(tl.int64) * VOCAB
    row = work + line.to(tl.int64) * VOCAB
    counted_slot = tl.load(counted_slots + line) if HAS_COUNTS else tl.full([], -1, tl.int32)
    count_row = counts + tl.maximum(counted_slot, 0).to(tl.int64) * VOCAB
    allowed_line = tl.load(allowed_lines + line) if HAS_ALLOWED else tl.full([], -1, tl.int32)
    allowed_row = allowed + tl.maximum(allowed_line, 0).to(tl.int64) * allowed_words
    table = parameters + line * 6
    repetition = tl.load(table + 3).to(tl.float32)
    frequency = tl.load(table + 4).to(tl.float32)
    presence = tl.load(table + 5).to(tl.float32)

    # Per lane: whether a logit is NaN, the largest raw logit, and the first id of the largest adjusted one.
    LANES: tl.constexpr = BLOCK // 4 if HAS_ADJUSTED else BLOCK  # Adjusting needs registers.
    nan = tl.zeros([LANES], tl.int32)
    raw_highest = tl.full([LANES], float("-inf"), tl.float32)
    highest = tl.full([LANES], float("-inf"), tl.float32)
    highest_ids = tl.zeros([LANES], tl.int32)
    for start in range(0, VOCAB, LANES):
        ids = start + tl.arange(0, LANES)
        inside = ids < VOCAB
        value = tl.load(raw_row + ids, mask=inside, other=float("-inf"))
        nan |= (value != value).to(tl.int32)
        raw_highest = tl.maximum(raw_highest, value)
        if HAS_ADJUSTED:
            value = tl.load(row + ids, mask=inside, other=float("-inf"))
            if HAS_COUNTS:
                entry = tl.load(count_row + ids, mask=inside & (counted_slot >= 0), other=0)
                generated = entry >> 1
                repeated = tl.where(
                    value > 0, tl.div_rn(value, repetition + tl.zeros_like(value)), value * repetition
                )
                value = tl.where(entry > 0, repeated, value)
                value -= frequency * generated.to(tl.float32) + tl.where(generated > 0, presence, 0.0)
            if HAS_ALLOWED:
                word = tl.load(allowed_row + ids // 32, mask=inside & (allowed_line >= 0), other=-1)
                value = tl.where((word >> (ids % 32)) & 1 != 0, value, float("-inf"))
            tl.store(row + ids, value, mask=inside)
        is_higher = value > highest
        highest_ids = tl.where(is_higher, ids, highest_ids)
        highest = tl.where(is_higher, value, highest)
    raw_best = tl.max(raw_highest, axis=0)
    best = tl.max(highest, axis=0)
    best_id = tl.min(tl.where(highest == best, highest_ids, VOCAB - 1), axis=0)
    pivot = tl.where(tl.abs(raw_best) == float("inf"), 0.0, raw_best)
    raw_sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        raw_sums += tl.exp(tl.load(raw_row + ids, mask=ids < VOCAB, other=float("-inf")) - pivot)
    raw_sum = tl.sum(raw_sums, axis=0)

    temperature = tl.load(table).to(tl.float32)
    is_bad = (tl.max(nan, axis=0) > 0) | (tl.abs(raw_best) == float("inf"))
    is_empty = tl.abs(best) == float("inf")
    token = best_id
    if (temperature > 0) & (not (is_bad | is_empty)):
        # Here and below, threads read what other threads stored.
        tl.debug_barrier()
        _store_weights(row if HAS_ADJUSTED else raw_row, row, best, temperature, VOCAB, BLOCK)
        tl.debug_barrier()
        top_p = tl.load(table + 1)
        floor = tl.load(table + 2).to(tl.float32).to(tl.int32, bitcast=True)
        top_k = tl.load(top_ks + line)
        if top_k > 0:
            floor = tl.maximum(floor, _top_k_floor(row, top_k, VOCAB, BLOCK))
        if top_p < 1.0:
            floor = _top_p_floor(row, floor, top_k, top_p, VOCAB, BLOCK)
        uniform = _uniform(tl.load(seeds + line), tl.load(positions + line))
        token = _invert(row, floor, uniform, VOCAB, BLOCK, SPAN)
    # The next step reads this and may be enqueued before the host knows the token; a failed row leaves a valid id, 0.
    ring_at = tl.load(slots + line).to(tl.int64) * RING + tl.load(positions + line) % RING
    tl.store(ring + ring_at, tl.where(is_bad | is_empty, 0, token))
    tl.store(token_ids + line, token)
    tl.store(statuses + line, tl.where(is_bad, 1, tl.where(is_empty, 2, 0)))
    tl.store(logprobs + line, tl.load(raw_row + token) - raw_best - tl.log(raw_sum))
