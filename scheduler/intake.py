"""Which requests can never run here: pure checks of a spec against the limits."""

from scheduler.config import SchedulerConfig
from scheduler.spec import Rejection, RequestSpec


def find_rejection(spec: RequestSpec, config: SchedulerConfig) -> Rejection | None:
    """The first limit that the request breaks by itself, whatever else is running."""
    num_prompt = len(spec.prompt_token_ids)
    if num_prompt == 0:
        return _reject("prompt", 0, 1, "prompt has 0 tokens: at least 1 is needed")
    if spec.max_tokens < 1:
        return _reject(
            "max_tokens", spec.max_tokens, 1, f"max_tokens is {spec.max_tokens}: at least 1 is needed"
        )
    total = num_prompt + spec.max_tokens
    wanted = f"prompt ({num_prompt}) + max_tokens ({spec.max_tokens}) is {total} tokens"
    if total > config.max_model_len:
        limit = config.max_model_len
        return _reject("prompt + max_tokens", total, limit, f"{wanted}: the model length allows {limit}")
    if total > config.pool_tokens:
        limit = config.pool_tokens
        return _reject("prompt + max_tokens", total, limit, f"{wanted}: the KV pool holds {limit}")
    return None


def reject_duplicate(request_id: str) -> Rejection:
    message = f"request_id {request_id} is already waiting or running: the limit is 1 at a time"
    return _reject("request_id", request_id, 1, message)


def reject_full(num_waiting: int, limit: int) -> Rejection:
    return _reject("waiting", num_waiting, limit, f"{num_waiting} requests are waiting: the limit is {limit}")


def _reject(field: str, value: int | str, limit: int, message: str) -> Rejection:
    return Rejection(field=field, value=value, limit=limit, message=message)
