"""Text, tokens and media of one model: prompts, ends of answers, and where text is needed."""

from __future__ import annotations

import copy
import datetime
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, cast

from vllm import LLMEngine, envs
from vllm.config import ModelConfig
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.base import MediaIO
from vllm.renderers import BaseRenderer, ChatParams, hf, merge_kwargs
from vllm.utils.mistral import is_mistral_tokenizer

from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.media import NO_MEDIA, Media
from tokenyard.protocol.wire import Assignment, Request, SamplingParams, prompt_field, unpack_tokens
from worker.engines.logprobs import wanted
from worker.engines.prompts import Encode, encode_text, remember_end_token, text_encoder
from worker.engines.resume import TextStream
from worker.engines.vllm.params import refusal
from worker.engines.vllm.request import EngineRequest

Ending = tuple[str, int | str | None]  # finish and stop reason


class ModelTokenizer:
    """The tokenizer of an engine's model, or its absence."""

    def __init__(self, engine: LLMEngine, model: ModelConfig) -> None:
        tokenizer: Any = None if model.skip_tokenizer_init else engine.get_tokenizer()
        self.is_there = tokenizer is not None
        self.of_vllm = tokenizer
        self._encode: Encode | None = tokenizer and text_encoder(tokenizer)
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._max_model_len: int = model.max_model_len
        self._chat: ChatPrompts | None = None
        if self.is_there:
            remember_end_token(tokenizer)
            self._chat = ChatPrompts(engine.renderer, self._max_model_len)
        self._end_tokens = _end_tokens(model, tokenizer)

    def request(self, assignment: Assignment) -> EngineRequest:
        """The request with its prompt; raises `InvalidRequest` if it cannot be tokenized."""
        request = assignment.request
        if request.tokens is not None:
            tokens = unpack_tokens(request.tokens)
            if request.media and self._chat is not None:
                return self._chat.with_media(tokens, assignment)
            return EngineRequest.of(assignment, tokens)
        if self._encode is None or self._chat is None:
            field = prompt_field(request)
            raise InvalidRequest(field, "this model has no tokenizer; give tokens")
        if request.prompt is not None:
            tokens = encode_text(
                "prompt", request.prompt, self.of_vllm, self._encode, self._max_model_len
            )
            return EngineRequest.of(assignment, tokens)
        return self._chat.request(assignment)

    def check(self, params: SamplingParams, wants_text: bool) -> None:
        """Raise `InvalidRequest` for parameters that need a tokenizer if the model has none."""
        if self.is_there:
            return
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name):
                raise refusal(ValueError(f"{name} needs a tokenizer; this model has none"), params)
        if wants_text:
            raise refusal(ValueError("detokenize needs a tokenizer; this model has none"), params)

    def can_continue(self, asked: EngineRequest) -> bool:
        """Whether a request can continue in the middle of its text.

        `TextStream` needs a fast tokenizer and lacks vLLM's rule for spaces.
        """
        params = asked.params
        spaced = params.spaces_between_special_tokens or params.skip_special_tokens
        return not asked.reads_text or (self._fast is not None and spaced)

    def text_stream(self, asked: EngineRequest) -> TextStream | None:
        """Makes the text of a request that continues; None if it needs none."""
        if self._fast is None or not asked.reads_text:
            return None
        return TextStream(self._fast, asked.prompt, asked.params)

    def detokenizes(self, asked: EngineRequest) -> bool:
        """Whether vLLM must turn tokens to text: for replies, stop strings or logprobs."""
        params = asked.params
        if not self.is_there or params.detokenize is False:
            return False
        asks = wanted(params) is not None or params.prompt_logprobs is not None
        return asked.reads_text or asks

    def ending_of_published(self, asked: EngineRequest) -> Ending | None:
        """Finish and stop reason if the published tokens are the whole answer, else None."""
        params, count = asked.params, len(asked.published)
        if not count:
            return None
        last = asked.published[-1]
        if count > params.min_tokens or not params.min_tokens:
            if last in (params.stop_token_ids or ()):
                return "stop", last
            if last in self._end_tokens and not params.ignore_eos:
                return "stop", self._end_tokens[last]
        room = self._max_model_len - len(asked.prompt)
        if count >= min(room, params.max_tokens or room):
            return "length", None
        return None


def _end_tokens(model: ModelConfig, tokenizer: Any) -> dict[int, int | None]:
    """Tokens that end an answer, with vLLM's stop reason for each."""
    configured = model.try_get_generation_config().get("eos_token_id")
    more = [configured] if isinstance(configured, int) else configured or []
    ends: dict[int, int | None] = {token: token for token in more}
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ends[tokenizer.eos_token_id] = None
    return ends


# Turns chat messages to token ids, with the same functions as ``vllm.LLM.chat``.
#
# vLLM's renderer parses the messages, detects the form of content that the model's chat template
# expects (once per template), and applies the template. docs/parity.md shows that the prompts are
# the
# same, token by token.

#: vLLM has moved it between modules, but `hf` always has it.
_NoTemplate: Final[type[Exception]] = vars(hf)["ChatTemplateResolutionError"]
#: Characters of a template's error message in ours.
_LONGEST_REASON: Final = 500


class ChatPrompts:
    """Makes the prompts of one model from chats."""

    def __init__(self, renderer: BaseRenderer[Any], max_model_len: int) -> None:
        self._renderer = renderer
        self._tokenizer = renderer.get_tokenizer()
        self._max_model_len = max_model_len
        # The chat template adds the special tokens.
        self._encode = text_encoder(self._tokenizer, add_special_tokens=False)
        self._tokenizes = is_mistral_tokenizer(self._tokenizer)  # while rendering
        self._tells_time = isinstance(renderer, hf.HfRenderer)

    def request(self, assignment: Assignment) -> EngineRequest:
        """The request of a chat.

        A template that asks for the date gets that of the acceptance, shown in UTC, so that every
        attempt has the same prompt. Raises `InvalidRequest` if the model has no chat template, or
        if it cannot take the messages.
        """
        if not assignment.media:
            rendered = self._rendered(assignment)
            return EngineRequest.of(assignment, self._tokens(rendered))

        with shown(assignment.media):
            rendered = self._rendered(assignment)
        return self._processed({**rendered, "prompt_token_ids": self._tokens(rendered)}, assignment)

    def with_media(self, tokens: list[int], assignment: Assignment) -> EngineRequest:
        """The request of a prompt as token ids, with a mark for each of its media."""
        model = self._renderer.model_config
        try:
            data = read(assignment.request.media, assignment.media, model)
        except Exception as error:  # bytes can be anything
            raise InvalidRequest("media", f"cannot be read: {_reason(error)}") from error
        return self._processed({"prompt_token_ids": tokens, "multi_modal_data": data}, assignment)

    def _processed(self, prompt: Any, assignment: Assignment) -> EngineRequest:
        """What the model's processor makes of a prompt and its media."""
        try:
            made: Any = self._renderer.process_for_engine(prompt, assignment.accepted_ms / 1000)
        except Exception as error:  # a processor is the model's program
            raise InvalidRequest(
                "media", f"the model cannot take them: {_reason(error)}"
            ) from error
        return EngineRequest.of(assignment, made["prompt_token_ids"], made)

    def _rendered(self, assignment: Assignment) -> dict[str, Any]:
        """What the template makes of a chat: text or token ids, and its media."""
        request = assignment.request
        try:
            _, prompt = self._renderer.render_messages(
                _own_copy(request.messages or []), self._params(request, assignment.accepted_ms)
            )
        except _NoTemplate:
            raise InvalidRequest(
                "messages", "this model has no chat template; give prompt or tokens"
            ) from None
        except Exception as error:  # a template is a program and can raise anything
            raise InvalidRequest(
                "messages", f"the chat template does not take them: {_reason(error)}"
            ) from error
        return cast("dict[str, Any]", prompt)

    def _tokens(self, rendered: Mapping[str, Any]) -> list[int]:
        if "prompt_token_ids" in rendered:
            return list(rendered["prompt_token_ids"])
        try:
            return encode_text(
                "messages", rendered["prompt"], self._tokenizer, self._encode, self._max_model_len
            )
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest("messages", "what the chat template makes is no text") from error

    def _params(self, request: Request, accepted_ms: int) -> ChatParams:
        """The parameters for vLLM's renderer, as `LLM.chat` makes them."""
        chat = request.chat
        given = dict(chat.chat_template_kwargs)
        if chat.documents is not None:
            given["documents"] = chat.documents
        if self._tells_time:  # other renderers have no templates
            given["strftime_now"] = _clock(accepted_ms)
        own = {
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
            "tools": chat.tools,
            "tokenize": self._tokenizes,
        }
        return ChatParams(chat_template_kwargs=merge_kwargs(given, own))


def _reason(error: Exception) -> str:
    return str(error)[:_LONGEST_REASON].encode(errors="backslashreplace").decode()


def _own_copy(messages: list[dict[str, Any]]) -> list[Any]:
    """A copy that vLLM may change: it parses the arguments of tool calls in place."""
    return [
        {**message, "tool_calls": copy.deepcopy(message["tool_calls"])}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _clock(unix_ms: int) -> Callable[[str], str]:
    """The function ``strftime_now`` of templates, at a fixed time."""
    return datetime.datetime.fromtimestamp(unix_ms / 1000, tz=datetime.UTC).strftime


# Pictures, sound and video: from the names in messages to what the engine takes. vLLM's own parts
# read and check the bytes, so its limits hold (`VLLM_MAX_IMAGE_PIXELS`). Nothing is fetched: a URL
# that is no name of the request's media has no content.

# For each sound it warns of the libraries that are not there, although others are.
logging.getLogger("vllm.multimodal.media.audio").setLevel(logging.ERROR)
_shown: ContextVar[Media] = ContextVar("media", default=NO_MEDIA)


@contextmanager
def shown(media: Media) -> Iterator[None]:
    """Let vLLM read these media, in this thread."""
    token = _shown.set(media)
    try:
        yield
    finally:
        _shown.reset(token)


def read(names: Mapping[str, Sequence[str]], media: Media, model: ModelConfig) -> dict[str, Any]:
    """The media of a prompt by modality, as vLLM's processors take them."""
    own = model.multimodal_config
    connector = _Connector(own.media_io_kwargs if own else None)
    fetch: dict[str, Callable[[str], Any]] = {
        "image": connector.fetch_image,
        "audio": connector.fetch_audio,
        "video": connector.fetch_video,
    }
    with shown(media):
        return {
            modality: [fetch[modality](one) for one in some] for modality, some in names.items()
        }


@MEDIA_CONNECTOR_REGISTRY.register(envs.VLLM_MEDIA_CONNECTOR)
class _Connector(MediaConnector):
    """Reads the media that are shown."""

    def load_from_url(self, url: str, media_io: MediaIO[Any], **_: Any) -> Any:
        content = _shown.get().get(url)
        if content is None:
            raise ValueError(f"{url[:80]} is not among the media of the request")
        return media_io.load_bytes(content)
