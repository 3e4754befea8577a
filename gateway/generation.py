"""Requests that generate, and those that only render: under which id, for which model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from gateway.frontend.media import MAX_FORM_BYTES
from gateway.frontend.models import STATE, FrontEnds
from gateway.http.context import CURRENT, RequestContext
from gateway.http.incoming import (
    BODY,
    TRANSCRIBING,
    Bodies,
    read_choice,
    read_deadline,
    read_event_id,
    read_interval,
    refuse_beam_search,
    replay,
    require_json,
    too_large,
    with_file_urls,
)
from gateway.http.principal import Principal
from gateway.http.records import Records, durable_id, fingerprint
from gateway.http.routes import Call, Register, Routes
from gateway.http.sse import Answer, BodyErrors
from gateway.models import ModelWatch
from gateway.queue.calls import Command
from gateway.queue.health import YardHealth
from gateway.queue.yard import YardQueue
from tokenyard.protocol.gateway_settings import GatewaySettings
from tokenyard.protocol.wire import DEFAULT_RESULT_TTL_S

if TYPE_CHECKING:
    from gateway.announcements import ModelProfile
    from gateway.responses.api import ResponsesApi

routes = Routes()
_HEADERS: Final = "generating_headers"
#: What needs only a tokenizer.
_FOR_ANY_TASK: Final = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})


def _generates(path: str, body: str, answer: str, tag: str = "generation") -> Register:
    """Register an endpoint that generates, whole or as events."""
    form: dict[str, Any] = {"body": body, "answer": answer, "takes": (_HEADERS,)}
    return routes(f"POST {path}", tag, is_stream=True, **form)


def _pools(path: str, body: str, answer: str, *, is_binary: bool = False) -> Register:
    """Register an endpoint of a task that pools."""
    form: dict[str, Any] = {"body": body, "answer": answer, "takes": (_HEADERS,)}
    return routes(f"POST {path}", "pooling", is_binary=is_binary, **form)


def _hears(path: str, answer: str, form: str) -> Register:
    """Register an endpoint that takes a form with a sound."""
    return routes(f"POST {path}", "audio", answer=answer, takes=(_HEADERS, form), is_stream=True)


@dataclass(frozen=True, slots=True)
class GenerationApi:
    """Gives each request to vLLM's front end of the model that it names."""

    settings: GatewaySettings
    queue: YardQueue
    front_ends: FrontEnds
    models: ModelWatch
    health: YardHealth
    bodies: Bodies
    responses: ResponsesApi
    records: Records

    @_generates("/v1/chat/completions", "ChatCompletionRequest", "ChatCompletion")
    async def create_chat_completion(self, call: Call) -> None:
        """Answer a chat."""
        await self._answer(call)

    @_generates("/v1/completions", "CompletionRequest", "Completion")
    async def create_completion(self, call: Call) -> None:
        """Continue a text."""
        await self._answer(call)

    @_generates("/v1/messages", "MessageRequest", "Message")
    async def create_message(self, call: Call) -> None:
        """Answer a chat in Anthropic's form."""
        await self._answer(call)

    @_generates("/v1/responses", "ResponseRequest", "Response", tag="responses")
    async def create_response(self, call: Call) -> None:
        """Make a response."""
        await self._answer(call)

    @_pools("/v1/embeddings", "EmbeddingRequest", "Embeddings", is_binary=True)
    async def create_embedding(self, call: Call) -> None:
        """Embed texts."""
        await self._answer(call)

    @_pools("/v2/embed", "CohereEmbedRequest", "CohereEmbeddings")
    async def create_cohere_embedding(self, call: Call) -> None:
        """Embed texts, in Cohere's form."""
        await self._answer(call)

    @_pools("/pooling", "PoolingRequest", "Pooling", is_binary=True)
    async def create_pooling(self, call: Call) -> None:
        """Pool texts, as the model does."""
        await self._answer(call)

    @_pools("/classify", "ClassificationRequest", "Classes")
    async def create_classify(self, call: Call) -> None:
        """Classify texts."""
        await self._answer(call)

    @_pools("/v1/score", "ScoreRequest", "Scores")
    @_pools("/score", "ScoreRequest", "Scores")
    async def create_score(self, call: Call) -> None:
        """Score pairs of texts."""
        await self._answer(call)

    @_pools("/v2/rerank", "RerankRequest", "Ranks")
    @_pools("/v1/rerank", "RerankRequest", "Ranks")
    @_pools("/rerank", "RerankRequest", "Ranks")
    async def do_rerank(self, call: Call) -> None:
        """Order documents by how well they answer a query."""
        await self._answer(call)

    @_hears("/v1/audio/transcriptions", "Transcription", "transcription_form")
    async def create_transcription(self, call: Call) -> None:
        """Write down what is said."""
        await self._answer(call)

    @_hears("/v1/audio/translations", "Translation", "translation_form")
    async def create_translation(self, call: Call) -> None:
        """Write down in English what is said."""
        await self._answer(call)

    @routes(
        "POST /v1/messages/count_tokens",
        "tokens",
        body="CountTokensRequest",
        answer="TokenCount",
    )
    async def count_tokens(self, call: Call) -> None:
        """Count the tokens of a chat."""
        await self._answer_without_queue(call)

    @routes("POST /tokenize", "tokens", body="TokenizeRequest", answer="TokenizeResponse")
    async def tokenize(self, call: Call) -> None:
        """Turn a text or a chat into tokens."""
        await self._answer_without_queue(call)

    @routes("POST /detokenize", "tokens", body="DetokenizeRequest", answer="DetokenizeResponse")
    async def detokenize(self, call: Call) -> None:
        """Turn tokens into a text."""
        await self._answer_without_queue(call)

    async def _answer_without_queue(self, call: Call) -> None:
        """Answer what vLLM's front end can answer by itself."""
        call, _ = await self._with_model(call, self.settings.max_tokenize_bytes)
        errors = BodyErrors(call.send, call.path, lambda: False)
        await self._render(call.scope, call.receive, errors.send, errors)

    async def _answer(self, call: Call) -> None:
        call, profile = await self._with_model(call, self.settings.max_body_bytes)
        body = call.scope[BODY].value
        refuse_beam_search(body)
        self.health.check()
        context, after = await self._context(call.headers, call.path, body, call.principal)

        has_key = context.is_first and not context.unsaved

        async def free_key() -> None:
            nonlocal has_key
            if has_key and not context.asked:
                has_key = False  # from now on it may be another's
                await self.records.forget(context.client, context.durable_id)

        async def freeing(message: Message) -> None:
            # Before the refusal is seen: its client may come again at once.
            if message["type"] == "http.response.start" and message["status"] >= 400:
                await free_key()
            await call.send(message)

        try:
            await self._generate(replace(call, send=freeing), profile.name, context, after)
        finally:
            await free_key()

    async def _with_model(self, call: Call, most_bytes: int) -> tuple[Call, ModelProfile]:
        """The request with its body parsed, and the model that it names, which is ready then."""
        client = call.principal.client
        if call.path in TRANSCRIBING:
            raw = await self.bodies.read(call.receive, client, MAX_FORM_BYTES)
            parsed = await self.bodies.parse_form(raw, call.scope, client)
        else:
            require_json(call.headers)
            raw = await self.bodies.read(call.receive, client)
            if len(raw) > most_bytes:
                raise too_large(most_bytes)
            parsed = await self.bodies.parse(raw, client)
        profile = self.models.find(parsed.value, call.principal.may_use)
        STATE.set(await self.front_ends.state_of(profile))
        if call.path not in _FOR_ANY_TASK:
            self.front_ends.check_path(profile, call.path)
        if b'"file_id"' in raw and "messages" in parsed.value:
            parsed.value["messages"] = with_file_urls(parsed.value["messages"])
        scope = {**call.scope, BODY: parsed}
        return replace(call, scope=scope, receive=replay(raw, call.receive)), profile

    async def _generate(self, call: Call, model: str, context: RequestContext, after: int) -> None:
        if call.path == "/v1/responses":
            await self.responses.create(call, model, context, after)
            return
        CURRENT.set(context)
        keep_alive_s = self.settings.keep_alive_s
        errors = BodyErrors(call.send, call.path, context.ticket.decided.is_set)
        answer = Answer(errors.send, context, call.path, after=after, keep_alive_s=keep_alive_s)
        inner = {**call.scope, "headers": _with_request_id(call.scope, context.durable_id)}
        try:
            await self._render(inner, call.receive, answer.send, errors, answer)
        finally:
            await answer.close()

    async def _render(
        self, scope: Scope, receive: Receive, send: Send, *replacing: Answer | BodyErrors
    ) -> None:
        """Call vLLM's app, which does not know when its answer was replaced."""
        try:
            await self.front_ends.app(scope, receive, send)
        except Exception:
            if not any(one.is_replaced for one in replacing):
                raise

    async def _context(
        self, headers: Headers, path: str, body: dict[str, Any], principal: Principal
    ) -> tuple[RequestContext, int]:
        """The request's own record and options, and the last event that the client has."""
        client = principal.client
        priority_class = principal.choose_class(body)
        key = headers.get("idempotency-key")
        # What can be refused comes first: a key should not belong to what was refused.
        has_ids = read_choice(headers, "X-Tokenyard-Event-Ids", "on", "off") == "on"
        choices = ("continue", "cancel")
        usual = reversed(choices) if key is None else choices
        rule = read_choice(headers, "X-Tokenyard-On-Disconnect", *usual)
        deadline_ms = read_deadline(headers, body, self.queue.broker_time.now_ms)
        name, after, is_first = durable_id(client, key), 0, True
        unsaved: list[Command] = []
        print_ = fingerprint(path, body)
        keep_s = DEFAULT_RESULT_TTL_S if key is None else self.settings.record_ttl_s
        if "last-event-id" in headers:
            name, after = read_event_id(headers["last-event-id"])
            record, is_first = await self.records.find(client, name, print_), False
        elif key is None:
            record, saving = self.records.begin(client, name, print_, keep_s)
            unsaved = [saving]
        else:
            record, is_first = await self.records.open(client, name, print_, keep_s)
        return RequestContext(
            durable_id=record.durable_id,
            client=client,
            created=record.created_ms / 1000,
            tenant=principal.tenant,
            priority_class=priority_class,
            may_go_first=principal.may_go_first,
            deadline_ms=deadline_ms,
            stream_interval_ms=read_interval(headers, principal.stream_interval_ms or None),
            continues=rule == "continue",
            can_come_back=key is not None or (has_ids and bool(body.get("stream"))),
            keep_s=keep_s,
            has_event_ids=has_ids,
            is_first=is_first,
            unsaved=unsaved,
        ), after


def _with_request_id(scope: Scope, name: str) -> list[tuple[bytes, bytes]]:
    kept = [one for one in scope["headers"] if one[0] != b"x-request-id"]
    return [*kept, (b"x-request-id", name.encode())]
