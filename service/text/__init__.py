"""Tokenizers, chat templates and detokenizers."""

from service.text.chat_template import ChatMessages
from service.text.detokenizer import Detokenizer
from service.text.load import load_tokenizer
from service.text.tokenizer import ByteTokenizer, ModelTokenizer, Tokenizer

__all__ = ["ByteTokenizer", "ChatMessages", "Detokenizer", "ModelTokenizer", "Tokenizer", "load_tokenizer"]
