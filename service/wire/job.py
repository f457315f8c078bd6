"""The job, as users publish it."""

import hashlib
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from service.wire import fields, limits, openai_fields
from service.wire.response_format import ResponseFormat, TextFormat

PROMPT_FIELDS = ("messages", "prompt", "prompt_token_ids")

_SEED_MASK = (1 << 64) - 1


def _describe_replies(schema: dict[str, Any]) -> None:
    """Describe in the schema what `Message._whole_reply` accepts."""
    empty = {"enum": list(openai_fields.EMPTY)}
    schema["required"] = ["role"]
    schema["properties"]["refusal"] = {"anyOf": [{"type": "string"}, empty]}
    either = [{"refusal": empty}, {"refusal": {"type": "string"}, "content": {"enum": [None, ""]}}]
    schema["if"] = {"properties": {"role": {"const": "assistant"}}}
    schema["then"] = {"anyOf": [{"properties": properties} for properties in either]}
    others = {"refusal": empty, "content": {"not": {"type": "null"}}}
    schema["else"] = {"properties": others, "required": ["content"]}


class Message(fields.StrictModel):
    """One turn. `developer` is OpenAI's newer name for `system` and reaches the chat template as `system`.

    A reply of an OpenAI API may be sent back unchanged: an assistant's content may be missing, and a refusal without
    content counts as what the assistant said.
    """

    model_config = ConfigDict(json_schema_extra=_describe_replies)
    empty_fields: ClassVar[frozenset[str]] = openai_fields.REPLY_FIELDS

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: fields.Content
    name: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_CHARS)] | None = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=limits.MAX_ID_CHARS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _whole_reply(cls, value: Any) -> Any:
        """Give an assistant's message without content its refusal as content, or an empty string."""
        if not isinstance(value, dict) or value.get("role") != "assistant" or value.get("content"):
            return value
        refusal = value.get("refusal")
        if not isinstance(refusal, str):
            return value if value.get("content") is not None else {**value, "content": ""}
        return {**value, "content": refusal, "refusal": None}

    def as_template_input(self) -> dict[str, str]:
        """Return the turn with the names that chat templates use."""
        role = "system" if self.role == "developer" else self.role
        turn = {"role": role, "content": self.content}
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


class SloTargets(fields.StrictModel):
    """Targets in milliseconds; a missing one takes the service class's target."""

    ttft_ms: fields.TargetMs | None = None
    tpot_ms: fields.TargetMs | None = None


class Job(fields.StrictModel):
    """One generation to run, as published; every field is bounded."""

    empty_fields: ClassVar[frozenset[str]] = openai_fields.REQUEST_FIELDS

    id: fields.Id
    model: Annotated[str, Field(min_length=1, max_length=limits.MAX_MODEL_CHARS)] | None = None

    messages: (
        Annotated[
            tuple[Message, ...],
            Field(strict=False, fail_fast=True, min_length=1, max_length=limits.MAX_MESSAGES),
            fields.bounded(limits.MAX_MESSAGES),
        ]
        | None
    ) = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    prompt_token_ids: fields.PromptTokenIds | None = None

    max_tokens: Annotated[int, Field(ge=1, le=limits.MAX_NEW_TOKENS)] | None = None
    """None allows as many as the service's default and the model's length do."""
    min_tokens: Annotated[int, Field(ge=0, le=limits.MAX_NEW_TOKENS)] = 0
    temperature: Annotated[float, fields.number(ge=0, le=limits.MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, fields.number(gt=0, le=1)] = 1.0
    top_k: fields.TopK = 0
    """0 and -1 keep the whole vocabulary; -1 is stored as 0."""
    min_p: fields.Probability = 0.0
    seed: Annotated[int, Field(ge=limits.MIN_SEED, le=limits.MAX_SEED)] | None = None
    stop: fields.Stop = ()
    ignore_eos: bool = False
    presence_penalty: fields.Penalty = 0.0
    frequency_penalty: fields.Penalty = 0.0
    repetition_penalty: Annotated[
        float, fields.number(ge=limits.MIN_REPETITION_PENALTY, le=limits.MAX_REPETITION_PENALTY)
    ] = 1.0
    logit_bias: fields.LogitBias | None = None
    logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    """As in OpenAI's completions: k alternatives beside each sampled token; 0 gives the sampled token alone."""
    n: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] = 1
    response_format: ResponseFormat = TextFormat(type="text")

    service_class: Literal["interactive", "standard", "batch"] = "standard"
    slo: SloTargets = SloTargets()
    deadline: fields.Deadline | None = None
    tenant: Annotated[str, Field(min_length=1, max_length=limits.MAX_TENANT_CHARS)] | None = None
    stream: bool = True
    return_token_ids: bool = False
    metadata: fields.Metadata | None = None
    custom_id: fields.CustomId | None = None
    """The producer's name for the job, echoed in its result; a batch line's gives the job its id."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        given = [name for name in PROMPT_FIELDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            reason = f"exactly one of {', '.join(PROMPT_FIELDS)} is needed, found {found}"
            raise fields.refusal(reason, limit=1, field="prompt", value=found)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            reason = f"{self.min_tokens} is above the limit {self.max_tokens} (max_tokens)"
            raise fields.refusal(reason, limit=self.max_tokens, field="min_tokens", value=self.min_tokens)
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(entry for entry in self.stop if isinstance(entry, str))

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return frozenset(entry for entry in self.stop if isinstance(entry, int))

    @property
    def logit_bias_items(self) -> tuple[tuple[int, float], ...]:
        return tuple(sorted((int(key), bias) for key, bias in (self.logit_bias or {}).items()))

    def template_messages(self) -> list[dict[str, str]]:
        return [message.as_template_input() for message in self.messages or ()]

    def seed_of_choice(self, index: int) -> int:
        """Return the 64-bit seed of one choice; without a seed in the job it derives from the id.

        A redelivered job must sample the same tokens again, so the seed is never random.
        """
        if self.seed is not None and index == 0:
            return self.seed & _SEED_MASK
        origin = self.id if self.seed is None else str(self.seed)
        hashed = hashlib.sha256(f"{origin}\0{index}".encode()).digest()
        return int.from_bytes(hashed[:8], "big")

    def deadline_at_ms(self, timestamp_ms: int) -> int | None:
        """Return the deadline in milliseconds since 1970, for a record stamped `timestamp_ms`."""
        if self.deadline is None:
            return None
        if isinstance(self.deadline, str):
            instant = fields.parse_rfc3339(self.deadline)
            assert instant is not None, "checked when the job was decoded"
            return int(instant.timestamp() * 1000)
        return timestamp_ms + int(self.deadline * 1000)


JOB_FIELDS: frozenset[str] = frozenset(Job.model_fields)


def job_schema() -> dict[str, Any]:
    return Job.model_json_schema(mode="validation")


def fingerprint(value: bytes | None) -> str:
    """Returns 128 bits of a record's value in hexadecimal: enough to tell the records of one id apart."""
    return hashlib.blake2b(value or b"", digest_size=16).hexdigest()
