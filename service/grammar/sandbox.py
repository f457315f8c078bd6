"""Compiles grammars in a process that may be killed. Runs as a script and imports only llguidance.

Reads one JSON line for each grammar and answers with one line that says what is wrong with it (null: nothing).
Exceeding the limit on processor time (SIGPROF) or on memory ends the process, which the parent takes as the verdict.
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
    with contextlib.suppress(
        ValueError, OSError
    ):  # macOS has no such limit; the limit on processor time holds there
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    # Bytes serve as tokens: the cost of compiling a grammar does not depend on the vocabulary.
    tokenizer = LLTokenizer("byte")
    parser_limits = LLParserLimits(verbose_errors=False, **limits)
    _answer("ready")
    for line in sys.stdin.buffer:
        text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        error = compile_error(tokenizer, text, parser_limits)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _answer(error)


def compile_error(tokenizer: LLTokenizer, text: str, limits: LLParserLimits) -> str | None:
    """Compile the grammar, follow it for a few bytes and return llguidance's error, if any.

    A grammar that matches nothing fails at the first byte; one with too many alternatives at once, at the second.
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
