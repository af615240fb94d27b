"""Texts and token ids: encoding beside the event loop, prompts from conversations, token texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from mural_server.api.chat_template import (
    AdapterTemplates,
    ContextValue,
    Rendering,
    render_trusted,
)
from mural_server.api.errors import BadParameter
from mural_server.api.requests import ChatMessage, TemplateOptions
from mural_server.catalog import ServedModel
from mural_server.detokenizer import TokenText, TokenTexts
from mural_server.tokenizer import ModelTokenizer

__all__ = ["TextPipeline", "check_length"]

MAX_CHARS_PER_TOKEN = 64

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def check_length(num_tokens: int, max_model_len: int) -> None:
    """Raise `BadParameter` unless a prompt leaves room for one token."""
    if num_tokens >= max_model_len:
        raise BadParameter(
            f"The prompt has {num_tokens} tokens, but this model's context (max_model_len) is "
            f"{max_model_len} tokens and at least one is needed for the answer: shorten it.",
            at="prompt",
            code="context_length_exceeded",
        )


class TextPipeline:
    """The tokenizer, worked from one thread so that a long prompt stalls no stream."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        token_texts: TokenTexts,
        *,
        max_model_len: int,
        vocab_size: int,
        chat_template: str | None,
        templates: AdapterTemplates,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._templates = templates
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._token_texts = token_texts

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; raise `BadParameter` when it cannot fit the context."""
        limit = self.max_model_len * MAX_CHARS_PER_TOKEN
        if len(text) > limit:
            # Not worth the time it would take to count exactly.
            raise BadParameter(
                f"The prompt has {len(text)} characters; with a context (max_model_len) of "
                f"{self.max_model_len} tokens at most {limit} are read: shorten it.",
                at="prompt",
                code="context_length_exceeded",
            )
        return await self._run(self._tokenizer.encode, text, add_special_tokens)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise `BadParameter` for an id outside the vocabulary."""
        if ids and max(ids) >= self.vocab_size:
            raise BadParameter(
                f"Token ids go from 0 to {self.vocab_size - 1}, not {max(ids)}.", at="prompt"
            )

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones included."""
        return await self._run(self._tokenizer.decode, ids)

    async def render_chat(
        self, served: ServedModel, messages: Sequence[ChatMessage], options: TemplateOptions
    ) -> str:
        """The prompt of a conversation, by the adapter's own template where it ships one.

        Raises `BadParameter` (no template, or it refuses the messages) and `UnusableAdapter`.
        """
        context: dict[str, ContextValue] = {
            **(options.chat_template_kwargs or {}),
            **self._tokenizer.special_tokens,
            "messages": [_as_context(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": options.add_generation_prompt,
        }
        if served.lora is not None and served.template is not None:
            template = await self._templates.template(served.lora, served.template)
            return await self._templates.render(
                Rendering(
                    template=template,
                    context=context,
                    continue_final_message=options.continue_final_message,
                )
            )
        if self._chat_template is None:
            raise BadParameter(
                "This model has no chat template: use /v1/completions, or start the server with "
                "--chat-template.",
                at="messages",
            )
        rendering = Rendering(
            template=self._chat_template,
            context=context,
            continue_final_message=options.continue_final_message,
        )
        return await self._run(render_trusted, rendering)

    def token_text(self, token_id: int) -> TokenText:
        """The text and bytes of one token by itself."""
        return self._token_texts.token_text(token_id)

    def token_names(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them."""
        return [str(name) for name in self._tokenizer.names(ids)]

    def close(self) -> None:
        """End the thread; what is under way is finished first."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)


def _as_context(message: ChatMessage) -> dict[str, ContextValue]:
    found: dict[str, ContextValue] = {"role": message.role, "content": message.text}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found
