"""Compiles grammars in a process that may be killed. Run as a script; imports llguidance and nothing of ours.

One JSON line in for each grammar, one out with what is wrong with it (null: nothing). Processor time beyond the limit
ends the process (SIGPROF), as does memory beyond its limit; either tells the parent enough.
"""

import contextlib
import json
import resource
import signal
import sys
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_NUM_BYTES = 8


def main(cpu_limit_s: float, memory_limit_bytes: int, limits: dict[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit; the one on processor time stays
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    # Bytes as tokens: what a grammar costs to compile does not depend on the vocabulary.
    tokenizer = LLTokenizer("byte")
    parser_limits = LLParserLimits(verbose_errors=False, **limits)
    _answer("ready")
    for line in sys.stdin.buffer:
        text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        error = trial_error(tokenizer, text, parser_limits)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _answer(error)


def trial_error(tokenizer: LLTokenizer, text: str, limits: LLParserLimits) -> str | None:
    """What llguidance says against the grammar, or against the first bytes of one text that follows it.

    That nothing matches shows at the first byte; too many alternatives at once, at the second.
    """
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    for _ in range(_NUM_BYTES):
        if matcher.is_error():
            break
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        following = next((byte for byte in range(0x21, 0x7F) if allowed >> byte & 1), None)
        if following is None or matcher.is_error():
            break
        matcher.consume_token(following)
    return matcher.get_error() if matcher.is_error() else None


def _answer(value: str | None) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
