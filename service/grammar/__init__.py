"""From a job's response_format to a grammar that the engine can follow, without risk to the engine."""

from service.grammar.gate import GrammarGate, GrammarLimits
from service.grammar.vocabulary import load_grammars

__all__ = ["GrammarGate", "GrammarLimits", "load_grammars"]
