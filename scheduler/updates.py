"""The outlet: what happened to each request since the caller last asked."""

from dataclasses import replace

from scheduler.plan import TokenLogprobs
from scheduler.request import Request
from scheduler.spec import FinishReason, RequestUpdate


class UpdateBox:
    """Collects at most one update per request; keyed by order number, because an id may come again."""

    def __init__(self) -> None:
        self._updates: dict[int, RequestUpdate] = {}

    def token(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> None:
        pending = self._updates.get(request.order)
        token_logprobs = () if logprobs is None else (logprobs,)
        if pending is None:
            self._updates[request.order] = RequestUpdate(
                request.spec.request_id,
                (token_id,),
                token_logprobs,
                num_cached_tokens=request.num_cached_tokens or 0,
            )
            return
        self._updates[request.order] = replace(
            pending,
            new_token_ids=(*pending.new_token_ids, token_id),
            logprobs=pending.logprobs + token_logprobs,
        )

    def end(self, request: Request, reason: FinishReason, error: str | None) -> None:
        pending = self._updates.get(request.order) or RequestUpdate(request.spec.request_id)
        assert pending.finish is None, f"{request.spec.request_id} ended twice"
        self._updates[request.order] = replace(
            pending, finish=reason, error=error, num_cached_tokens=request.num_cached_tokens or 0
        )

    def take(self) -> list[RequestUpdate]:
        updates = list(self._updates.values())
        self._updates.clear()
        return updates
