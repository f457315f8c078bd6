"""SentencePiece vocabularies with byte fallback, as Gemma has them, built from their pieces and scores."""

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer, decoders, models, normalizers

_NORMAL: Final = 1
_SPACE: Final = "▁"


def sentencepiece_tokenizer(
    names: Sequence[str], scores: Sequence[float], types: Sequence[int], unknown: str | None
) -> Tokenizer:
    """Without a space in front of the text; whoever calls adds the special tokens.

    SentencePiece joins, of all neighbours that make a piece, those whose piece scores best. That is BPE with
    one merge for each way to cut a piece in two, the best piece's first.
    """
    vocab = {name: token_id for token_id, name in enumerate(names)}
    merges: list[tuple[str, str]] = []
    pieces = [token_id for token_id, kind in enumerate(types) if kind == _NORMAL and len(names[token_id]) > 1]
    for token_id in sorted(pieces, key=lambda i: -scores[i]):
        name = names[token_id]
        cuts = ((name[:at], name[at:]) for at in range(len(name) - 1, 0, -1))
        merges.extend((left, right) for left, right in cuts if left in vocab and right in vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer
