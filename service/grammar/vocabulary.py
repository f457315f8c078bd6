"""The vocabulary of a loaded model, as grammars need it."""

from collections.abc import Set as AbstractSet

from kernels.grammar import Grammars, TokenVocabulary
from service.text.tokenizer import Tokenizer


def load_grammars(tokenizer: Tokenizer, eos_token_ids: AbstractSet[int], vocab_size: int) -> Grammars | None:
    """None for a model that knows no end of sequence: no grammar could end there. Takes about 0.3 s."""
    if not eos_token_ids:
        return None
    # An end is never text, even where the model's files do not mark it as special.
    token_bytes = [
        b"" if token_id in eos_token_ids else tokenizer.token_bytes(token_id)
        for token_id in range(tokenizer.vocab_size)
    ]
    return Grammars(TokenVocabulary(token_bytes, frozenset(eos_token_ids)), vocab_size)
