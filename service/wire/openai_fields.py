"""Fields of OpenAI's requests and replies that this service does not support, and the values it ignores."""

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
"""Fields of a message that came from such an API and is sent back."""
EMPTY: Final[tuple[Any, ...]] = (None, False, "", [], {})


def is_empty(value: Any) -> bool:
    """Tell whether a field with this value asks for nothing; 0 is a number and asks for something."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)
