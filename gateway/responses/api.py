"""The routes of the Responses API. All state is in the broker, so any gateway serves any of them.

vLLM's own routes keep responses in memory. Here a response is its body in the broker and its
request on the queue. To read one is to ask vLLM's front end once more with that body; it gets the
replies from the first, and nothing is submitted.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from starlette.types import Send

from gateway.http.errors import GatewayError, as_json, invalid
from gateway.http.incoming import BODY, Bodies, ParsedBody, dumps_in_python, read_event_id
from gateway.http.routes import Call, Routes, is_true, number_in, page
from gateway.http.sse import Answer, send_body
from gateway.responses.bodies import (
    PATH,
    ResponseOptions,
    as_items,
    carried,
    for_front_end,
    listed,
    read_options,
)
from gateway.responses.rendering import Renderer, replay_context
from gateway.responses.store import ResponseStore, StoredResponse, not_found
from gateway.responses.tap import Body

if TYPE_CHECKING:
    from gateway.frontend.models import FrontEnds
    from gateway.http.context import RequestContext
    from gateway.models import ModelWatch
    from gateway.queue.calls import Command
    from gateway.queue.yard import YardQueue
    from tokenyard.protocol.gateway_settings import GatewaySettings

routes = Routes()


class ResponsesApi:
    """Creates responses, and serves those that are stored."""

    def __init__(
        self,
        settings: GatewaySettings,
        queue: YardQueue,
        front_ends: FrontEnds,
        models: ModelWatch,
        bodies: Bodies,
    ) -> None:
        self._settings = settings
        self._bodies = bodies
        self._store = ResponseStore(queue, settings.record_ttl_s)
        self._renderer = Renderer(front_ends, models)

    async def create(self, call: Call, model: str, context: RequestContext, after: int) -> None:
        """Serve ``POST /v1/responses``; of a stream, only the events behind number ``after``."""
        body: ParsedBody = call.scope[BODY]
        options = read_options(body.value)
        stored, saving = await self._open(body, model, context, options)
        context.continues = context.continues or options.is_background
        if options.is_kept:
            context.keep_s = self._settings.record_ttl_s
        headers = call.scope["headers"]
        try:
            if options.is_background and not options.is_stream:
                opening = await self._renderer.queue_up(stored, context, headers)
                await send_body(call.send, 200, as_json(opening), context.headers())
            else:
                answer = self._answer(call.send, context, after)
                await self._renderer.answer(stored, context, headers, call.receive, answer)
        finally:
            if saving is not None and context.is_first and not context.ticket.is_accepted:
                context.unsaved = [one for one in context.unsaved if one is not saving]
                await self._store.delete(stored, is_counted=True)

    async def _open(
        self, parsed: ParsedBody, model: str, context: RequestContext, options: ResponseOptions
    ) -> tuple[StoredResponse, Command | None]:
        """The response with its whole conversation, and what stores it with its request."""
        name = f"resp_{context.durable_id}"
        known = None if context.is_first else await self._store.find(context.client, name)
        if known is not None:
            return known, None
        body = parsed.value
        if options.previous is not None:
            body = body | {
                "input": await self._conversation(context.client, options.previous, body)
            }
        if parsed.is_small:
            packed = for_front_end(body, name, options)
        else:
            packed = await asyncio.to_thread(for_front_end, body, name, options, dumps_in_python)
        mine = StoredResponse(
            durable_id=context.durable_id,
            client=context.client,
            created_ms=round(context.created * 1000),
            model=model,
            body=packed,
            previous=options.previous,
            is_background=options.is_background,
            is_stream=options.is_stream or options.is_background,
        )
        most = self._settings.max_body_bytes
        if len(mine.body) > most:
            field = "input" if options.previous is None else "previous_response_id"
            raise invalid(field, f"the whole conversation has more than {most} bytes")
        if not options.is_kept:
            return mine, None
        saving = await self._store.reserve(mine)
        context.unsaved.append(saving)
        return mine, saving

    async def _conversation(self, client: str, previous: str, body: Body) -> list[Any]:
        """The items of the turns before, and of this one."""
        before = await self._store.find(client, previous)
        status = None if before is None else await self._store.status(before)
        if before is None or status is None:
            message = f"Previous response with id {previous[:80]!r} not found."
            raise GatewayError(
                400, message, param="previous_response_id", code="previous_response_not_found"
            )
        if status != "over":
            raise invalid("previous_response_id", f"that response is still {status}")
        earlier = as_items(json.loads(before.body)["input"])
        output = (await self._renderer.finished(before))["output"]
        return [*earlier, *carried(output), *as_items(body["input"])]

    def _answer(self, send: Send, context: RequestContext, after: int) -> Answer:
        keep_alive_s = self._settings.keep_alive_s
        return Answer(send, context, PATH, after=after, keep_alive_s=keep_alive_s)

    @routes(
        "GET /v1/responses/{response_id}",
        "responses",
        answer="Response",
        is_stream=True,
        takes=("replay",),
    )
    async def retrieve_response(self, call: Call) -> None:
        """Read a response as it is now, or its events."""
        query = call.query
        stored = await self._stored(call)
        if not is_true(query, "stream"):
            await call.answer(await self._now(stored))
            return
        if not stored.is_stream:
            raise invalid("stream", "this response was created without `stream` or `background`")
        if await self._store.status(stored) is None:
            raise not_found(stored.id)
        after = number_in(query, "starting_after", -1) + 1
        headers = call.headers
        if "last-event-id" in headers:
            name, after = read_event_id(headers["last-event-id"])
            if name != stored.durable_id:
                raise invalid("Last-Event-ID", "this is an event of another response")
        await self._bodies.read(call.receive, stored.client)
        shown = replay_context(stored)
        shown.ticket.accept()  # how the request ended is in the last event
        answer = self._answer(call.send, shown, after)
        await self._renderer.answer(stored, replay_context(stored), (), call.receive, answer)

    async def _now(self, stored: StoredResponse) -> Body:
        """A response as it is at the moment."""
        status = await self._store.status(stored)
        if status is None:
            raise not_found(stored.id)
        if status == "over":
            return await self._renderer.finished(stored)
        return await self._renderer.opening(stored) | {"status": status}

    @routes("POST /v1/responses/{response_id}/cancel", "responses", answer="Response")
    async def cancel_response(self, call: Call) -> None:
        """Cancel a response that was made with `background`."""
        stored = await self._stored(call)
        if not stored.is_background:
            raise GatewayError(400, "Cannot cancel a synchronous response.", param="response_id")
        if await self._store.status(stored) in ("queued", "in_progress"):
            await self._store.cancel(stored)
        await call.answer(await self._now(stored))

    @routes("DELETE /v1/responses/{response_id}", "responses", answer="Deleted")
    async def delete_response(self, call: Call) -> None:
        """Delete a response; a request under way is cancelled."""
        stored = await self._stored(call)
        await self._store.delete(stored)
        if await self._store.status(stored) in ("queued", "in_progress"):
            await self._store.cancel(stored)
        await call.answer({"id": stored.id, "object": "response", "deleted": True})

    @routes(
        "GET /v1/responses/{response_id}/input_items",
        "responses",
        answer="ItemPage",
        takes=("page",),
    )
    async def list_input_items(self, call: Call) -> None:
        """List the input of a response, earlier turns included."""
        stored = await self._stored(call)
        items = listed(stored.id, json.loads(stored.body)["input"])
        await call.answer(page(items, call.query))

    async def _stored(self, call: Call) -> StoredResponse:
        """The response of the path; raises `GatewayError`."""
        return await self._store.get(call.principal.client, call.params["response_id"])
