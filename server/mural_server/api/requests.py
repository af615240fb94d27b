"""The request bodies. What would change an answer and is not spoken here is refused, by name.

A field is either used, or accepted because it cannot change the answer (`Inert`), or accepted in
the one value that asks for nothing. Everything else is an unknown parameter.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

from mural_server.sampling_params import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS

__all__ = [
    "MAX_PROMPTS",
    "MAX_SEQUENCES",
    "AliasRequest",
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "DetokenizeRequest",
    "LoadLoRARequest",
    "NamedLoRARequest",
    "SamplingBody",
    "TemplateOptions",
    "TextPart",
    "TokenizeRequest",
]

MAX_PROMPTS = 64
MAX_SEQUENCES = 128
MAX_MESSAGES = 2048
MAX_TEMPLATE_KWARGS = 16
MAX_INT = (1 << 63) - 1

TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Count = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=20_000)]
Salt = Annotated[str, StringConstraints(min_length=1, max_length=256)]
# Values that may be large are never looked at: they are for the caller's own records.
Inert = JsonValue


class Body(BaseModel):
    """Types are exact (no "5" for 5), numbers finite, unknown fields refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None
    """Padding against traffic analysis; none is ever added."""


class SamplingBody(Body):
    """What both generating endpoints take."""

    model: ModelName
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    min_tokens: Count = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    add_special_tokens: bool | None = None

    # Cannot change the answer.
    user: Inert = None
    metadata: Inert = None
    store: Inert = None
    safety_identifier: Inert = None
    prompt_cache_key: Inert = None
    prompt_cache_retention: Inert = None
    request_id: Inert = None

    # Accepted in the value that asks for nothing.
    service_tier: Literal["auto", "default"] | None = None
    priority: Literal[0] | None = None
    use_beam_search: Literal[False] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    truncate_prompt_tokens: None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is not available with stream: true")
        return self

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_running_usage(self) -> bool:
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats


Prompt = str | list[TokenId] | list[str] | list[list[TokenId]]


class CompletionRequest(SamplingBody):
    """``POST /v1/completions``."""

    prompt: Prompt
    max_tokens: Count | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must equal n, since nothing is generated and thrown away")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1 unless echo is true")
        if not self.prompt:
            raise ValueError("prompt must not be empty")
        if len(self.prompts) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts go in one request")
        if len(self.prompts) * (self.n or 1) > MAX_SEQUENCES:
            raise ValueError(f"prompts times n may be at most {MAX_SEQUENCES}")
        if not all(self.prompts):
            raise ValueError("a prompt must not be empty")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or many: texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # the union tells by its first item
        return self.prompt  # type: ignore[return-value]  # neither a text nor one list of ids


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message; only text is understood."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    refusal: None = None
    tool_calls: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    tool_call_id: Annotated[str, StringConstraints(max_length=256)] | None = None
    reasoning: None = None
    reasoning_content: None = None
    annotations: Inert = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None:
            raise ValueError("content must be a text or a list of text parts")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ResponseFormat(Body):
    type: Literal["text"]


# What a template is given by the server, and transformers' own parameters.
RESERVED_TEMPLATE_NAMES = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "conversation", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("raise_exception", "strftime_now", "self", "bos_token", "eos_token", "unk_token"),
        *("sep_token", "pad_token", "cls_token", "mask_token", "additional_special_tokens"),
    )
)


class TemplateOptions(Body):
    """How a conversation is rendered."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: (
        Annotated[dict[str, JsonValue], Field(max_length=MAX_TEMPLATE_KWARGS)] | None
    ) = None
    chat_template: None = None
    documents: None = None

    @model_validator(mode="after")
    def _check_template_options(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt exclude each other: set one of "
                "them to false"
            )
        for key in self.chat_template_kwargs or {}:
            if not key.isidentifier() or not key.isascii() or key in RESERVED_TEMPLATE_NAMES:
                raise ValueError("chat_template_kwargs holds a name that is not allowed")
        return self


def _check_last_message(messages: list[ChatMessage] | None, options: TemplateOptions) -> None:
    if options.continue_final_message and messages and messages[-1].role != "assistant":
        raise ValueError("continue_final_message needs a last message of the assistant")


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatCompletionRequest(TemplateOptions, SamplingBody):
    """``POST /v1/chat/completions``."""

    messages: Messages
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Inert = None
    functions: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    audio: None = None
    prediction: Inert = None
    """A guess that only makes an answer faster, never another."""
    web_search_options: None = None
    echo: Literal[False] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        _check_last_message(self.messages, self)
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if (
            self.max_tokens is not None
            and self.max_completion_tokens is not None
            and self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        return self


class TokenizeRequest(TemplateOptions):
    """``POST /tokenize``: a prompt, or a conversation."""

    model: ModelName
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        _check_last_message(self.messages, self)
        return self


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: ModelName
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]


class LoadLoRARequest(Body):
    """``POST /v1/load_lora_adapter``, as vLLM takes it; ``shared`` opens it to every tenant."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool = False
    base_model_name: Inert = None
    is_3d_lora_weight: Literal[False] | None = None
    shared: bool = False
    pinned: bool = False


class NamedLoRARequest(Body):
    """``POST /v1/unload_lora_adapter`` and the pin endpoints."""

    lora_name: str | None = None
    lora_int_id: Inert = None


class AliasShare(Body):
    version: Annotated[str, StringConstraints(max_length=128)]
    weight: float = 1.0


class AliasRequest(Body):
    """``PUT /v1/adapters/{tenant}/{adapter}/aliases/{alias}``."""

    versions: Annotated[list[AliasShare], Field(min_length=1, max_length=64)]
