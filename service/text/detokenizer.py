"""Turns token ids into text as they arrive."""

import codecs
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from service.text.stop_strings import stop_matcher

TokenBytes = Callable[[int], bytes]


class Detokenizer:
    """Releases the text of one choice as soon as it is certain: whole characters outside any possible stop string.

    The text released after N tokens depends on those N tokens alone, however calls of `feed` group them, so
    a redelivered job that feeds the same tokens again reaches the same state. Stop strings are searched in
    the text, not in tokens, so token boundaries do not matter. The stop string that is complete first ends
    the text; among those that end at the same character, the longest does.

    Only the bytes of fed tokens are decoded, so no text of the prompt can come out; a character whose first
    bytes belong to the prompt becomes U+FFFD. The cost of a token is linear in its length.
    """

    __slots__ = (
        "_decoder",
        "_hidden",
        "_matcher",
        "_min_tokens",
        "_num_tokens",
        "_pending",
        "_pieces",
        "_state",
        "_strip_space",
        "_token_bytes",
        "finished",
        "stopped",
    )

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        hidden_token_ids: AbstractSet[int] = frozenset(),
        strip_leading_space: bool = False,
    ) -> None:
        """`token_bytes` maps an id to its bytes; a special token has none.

        A stop string counts only when a token after the first `min_tokens` completes it. Ids in
        `hidden_token_ids` (a job's stop ids) give no text.
        """
        self._token_bytes = token_bytes
        self._hidden = hidden_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = stop_matcher(stop) if stop else None
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._state = 0
        self._pending = ""
        self._pieces: list[str] = []
        self._strip_space = strip_leading_space
        self.stopped = False
        """A stop string was found; the text ends before it, and further tokens are ignored."""
        self.finished = False

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that may be released now, which is often empty."""
        released = [self._feed_one(token_id) for token_id in token_ids]
        return released[0] if len(released) == 1 else "".join(released)

    def finish(self) -> str:
        """End the text and return what was held back; an unfinished character becomes U+FFFD."""
        if self.finished:
            return ""
        self.finished = True
        released = "" if self.stopped else self._release(self._decoder.decode(b"", final=True))
        rest, self._pending = self._pending, ""  # empty when a stop string was found
        if rest:
            self._pieces.append(rest)
        return released + rest

    @property
    def text(self) -> str:
        """The text released so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def num_held_chars(self) -> int:
        """The number of characters held back for a possible stop string; less than the longest one has."""
        return len(self._pending)

    def _feed_one(self, token_id: int) -> str:
        if self.stopped or self.finished:
            return ""
        self._num_tokens += 1
        if token_id in self._hidden:
            return ""
        data = self._token_bytes(token_id)
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._release(self._decoder.decode(data)) if data else ""

    def _release(self, text: str) -> str:
        if not text:
            return ""
        if self._matcher is not None:
            text = self._hold_back(text)
        if text:
            self._pieces.append(text)
        return text

    def _hold_back(self, text: str) -> str:
        """Add `text` to the pending text and return what can no longer belong to a stop string."""
        matcher = self._matcher
        assert matcher is not None
        counts = self._num_tokens > self._min_tokens
        state = self._state
        window = self._pending + text
        for position, character in enumerate(text, start=len(self._pending) + 1):
            state = matcher.advance(state, character)
            if matched := matcher.matched(state):
                if counts:
                    self.stopped = True
                    self._pending = ""
                    return window[: position - matched]
                state = matcher.pass_over(state)
        self._state = state
        keep = len(window) - matcher.held(state)
        self._pending = window[keep:]
        return window[:keep]
