"""Turns text into token ids and back, for the model that is served."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final, Protocol

import tokenizers

from service.errors import JobError
from service.text.chat_template import ChatMessages, ChatTemplate
from service.text.detokenizer import Detokenizer
from service.text.markers import Markers
from service.text.text_bound import TextBound, too_long
from service.text.vocabulary import Vocabulary
from service.wire.common import token_name

# Tokens with which chat models end a turn or a document, whatever their configuration names as the end.
_KNOWN_ENDS: Final = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<end_of_turn>", "<|end|>", "<|return|>", "<|end_of_turn|>", "</s>"),
)

# A Unicode noncharacter: templates do not contain it, and messages do not need it.
_BREAK: Final = "\ufdd0"


class Tokenizer(Protocol):
    """Encodes prompts and decodes tokens. Safe to use from several threads.

    Encode on a worker thread: a long text takes a second. Given `max_tokens`, encoding raises JobError for a text that
    cannot fit in so many, without tokenizing it.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def special_token_ids(self) -> frozenset[int]: ...
    def encode_prompt(self, text: str, *, max_tokens: int | None = None) -> list[int]: ...
    def encode_chat(
        self, messages: ChatMessages, *, timestamp_ms: int | None = None, max_tokens: int | None = None
    ) -> list[int]: ...
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        stop: tuple[str, ...] = (),
        *,
        min_tokens: int = 0,
        hidden_token_ids: AbstractSet[int] = frozenset(),
    ) -> Detokenizer: ...
    def decode(self, token_ids: Sequence[int], prompt_token_ids: Sequence[int] = ()) -> str: ...


class ModelTokenizer:
    """Uses a model's own tokenizer.

    A `prompt` is the job's own text to the last character, so the names of special tokens in it mean these
    tokens: that is how a user writes a template by hand. `messages` hold other people's words: there the
    names are ordinary text, and no content can end its turn or open another.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None,
        end_token_ids: frozenset[int],
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._vocabulary = Vocabulary(tokenizer)
        self._markers = Markers(self._vocabulary.markers)
        known = {i for i, name in self._vocabulary.special.items() if name in _KNOWN_ENDS}
        self._eos_token_ids = end_token_ids | known
        self._unmarked_ends = end_token_ids - self._vocabulary.special.keys()
        self._opening = _opening_of(tokenizer)
        self._bound = TextBound(tokenizer)

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset(self._vocabulary.special)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode_prompt(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the id that opens every text of this model, then the text's ids.

        The opening id comes once, even when a template written by hand holds it too. Raises JobError for a text
        that cannot fit in `max_tokens`.
        """
        if max_tokens is not None:
            self._bound.check("prompt", text, max_tokens)
        ids = self._encode([text], add_special_tokens=True)
        added = len(self._opening)
        written_too = added > 0 and ids[added : 2 * added] == self._opening
        return ids[added:] if written_too else ids

    def encode_chat(
        self, messages: ChatMessages, *, timestamp_ms: int | None = None, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids up to where the assistant begins.

        Raises JobError when the model's template refuses, or the text cannot fit in `max_tokens`.
        """
        if self._chat_template is None:
            raise JobError(
                "invalid_value", "messages: the model has no chat template; use prompt", field="messages",
                value=f"{len(messages)} messages", limit="prompt or prompt_token_ids",
            )  # fmt: skip
        texts = [text for message in messages for part, text in message.items() if part != "role"]
        if not any(self._markers.any_in(text) for text in texts):
            pieces = [self._chat_template.render(messages, timestamp_ms=timestamp_ms)]
        else:
            harmless = [
                {part: text if part == "role" else self._broken_up(text) for part, text in message.items()}
                for message in messages
            ]
            # Pieces are encoded one by one, so that a marker written by a user is whole in none of them.
            rendered = self._chat_template.render(harmless, timestamp_ms=timestamp_ms)
            pieces = [piece for piece in rendered.split(_BREAK) if piece]
        if max_tokens is not None:
            self._bound.check("messages", "".join(pieces), max_tokens)
        # The template writes the opening token itself.
        return self._encode(pieces, add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """Return one token's text, to show it beside its log-probability."""
        return self._vocabulary.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to a text; nothing for a special token."""
        return self._vocabulary.token_bytes(token_id)

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        stop: tuple[str, ...] = (),
        *,
        min_tokens: int = 0,
        hidden_token_ids: AbstractSet[int] = frozenset(),
    ) -> Detokenizer:
        """Make the detokenizer of one choice; `hidden_token_ids` are the job's stop ids, which give no text."""
        special = self._vocabulary.special
        opens_text = self._vocabulary.strips_leading_space and all(i in special for i in prompt_token_ids)
        return Detokenizer(
            self._vocabulary.token_bytes,
            stop=stop,
            min_tokens=min_tokens,
            hidden_token_ids=hidden_token_ids | self._unmarked_ends,
            strip_leading_space=opens_text,
        )

    def decode(self, token_ids: Sequence[int], prompt_token_ids: Sequence[int] = ()) -> str:
        """Decode ids that follow the prompt, without special tokens."""
        whole = self.detokenizer(prompt_token_ids)
        return whole.feed(token_ids) + whole.finish()

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[int]:
        # `encode` would keep the interpreter lock, and with it the event loop and the step, for up to a second.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [token_id for encoding in encodings for token_id in encoding.ids]

    def _broken_up(self, content: str) -> str:
        return self._markers.broken_up(content.replace(_BREAK, ""), _BREAK)


def _opening_of(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Return what the tokenizer puts before every text: usually the token that begins a document, or nothing."""
    probe = tokenizer.encode("a", add_special_tokens=True)
    num_added = next((i for i, added in enumerate(probe.special_tokens_mask) if not added), len(probe))
    opening: list[int] = probe.ids[:num_added]
    return opening


class ByteTokenizer:
    """Tokenizes for the deterministic engine: ids 0 to 255 are bytes, and 256 is the end."""

    EOS: Final = 256

    vocab_size = 257
    eos_token_ids = frozenset({EOS})
    special_token_ids = frozenset({EOS})

    def encode_prompt(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        return self._encode("prompt", text, max_tokens)

    def encode_chat(
        self,
        messages: ChatMessages,
        *,
        timestamp_ms: int | None = None,  # noqa: ARG002 - the protocol's
        max_tokens: int | None = None,
    ) -> list[int]:
        turns = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self._encode("messages", "".join(turns) + "assistant: ", max_tokens)

    def _encode(self, field: str, text: str, max_tokens: int | None) -> list[int]:
        if max_tokens is not None and len(text) > max_tokens:
            raise too_long(field, len(text), max_tokens, 1)
        return list(text.encode())

    def token_text(self, token_id: int) -> str:
        return "<end>" if token_id == self.EOS else token_name(self.token_bytes(token_id))

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],  # noqa: ARG002 - the protocol's
        stop: tuple[str, ...] = (),
        *,
        min_tokens: int = 0,
        hidden_token_ids: AbstractSet[int] = frozenset(),
    ) -> Detokenizer:
        return Detokenizer(
            self.token_bytes, stop=stop, min_tokens=min_tokens, hidden_token_ids=hidden_token_ids
        )

    def decode(self, token_ids: Sequence[int], prompt_token_ids: Sequence[int] = ()) -> str:
        whole = self.detokenizer(prompt_token_ids)
        return whole.feed(token_ids) + whole.finish()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if 0 <= token_id < 256 else b""
