"""Turns a job's response_format into a grammar that the engine can follow safely."""

from service.grammar.validator import GrammarLimits, GrammarValidator, load_grammars

__all__ = ["GrammarLimits", "GrammarValidator", "load_grammars"]
