"""Fields of OpenAI's requests and replies that this service does not serve, and when they do no harm."""

from typing import Any, Final

REQUEST_FIELDS: Final = frozenset(
    (
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "store", "user"),
        *("stream_options", "modalities", "audio", "prediction", "reasoning_effort", "verbosity"),
        *("web_search_options", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
        *("service_tier", "echo", "suffix", "best_of", "stop_token_ids"),
    )
)
REPLY_FIELDS: Final = frozenset(
    (
        *("refusal", "tool_calls", "function_call", "annotations", "audio", "reasoning", "reasoning_content"),
        "reasoning_details",
    )
)
"""Of a message that came from such an API and is sent back to it."""
EMPTY: Final[tuple[Any, ...]] = (None, False, "", [], {})


def is_empty(value: Any) -> bool:
    """Whether a field with this value asks for nothing; 0 is a number that asks for something."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)
