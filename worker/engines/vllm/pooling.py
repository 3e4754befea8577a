"""Tasks that pool prompts into numbers: embeddings, classes and scores.

vLLM's own processors make the prompts and join the outputs, as in `vllm.LLM.embed`, `classify`,
`score` and `encode`. They are those of vLLM 0.32 and newer.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import msgspec
from vllm import LLMEngine, PoolingParams
from vllm.entrypoints.pooling.scoring.io_processor import ScoringIOProcessor, ScoringIOProcessors
from vllm.entrypoints.pooling.typing import OfflineOutputsContext, OfflineScoringInputsContext
from vllm.entrypoints.pooling.utils import enable_scoring_api
from vllm.model_executor.model_loader import get_model_cls
from vllm.outputs import PoolingRequestOutput
from vllm.renderers.chat_utils import ChatTemplateConfig
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.tasks import SCORE_TYPE_MAP

from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.wire import TASKS, Input, Task, unpack_tokens
from worker.engines.admission import check_ids
from worker.engines.vllm.params import reason_of
from worker.engines.vllm.pooling_answer import QUERY, PooledPart, PoolingAnswer
from worker.engines.vllm.request import EngineRequest

Prepared = tuple[PoolingAnswer, list[PooledPart]]


class Pooling:
    """The tasks of one model that pools."""

    def __init__(self, engine: LLMEngine) -> None:
        config = engine.vllm_config
        self._model = config.model_config
        self._renderer = engine.renderer
        self._vocab_size: int = self._model.get_vocab_size()
        supported = engine.get_supported_tasks()
        self._own = self._model.get_pooling_task(supported)
        # The engine would fail for all its requests.
        forward: Any = get_model_cls(self._model).forward
        self._has_token_types = "token_type_ids" in inspect.signature(forward).parameters
        self._scoring: ScoringIOProcessor | None = None
        if enable_scoring_api(supported, self._model):
            # vLLM's server caches queries in one worker; requests of a yard come to several.
            kind = SCORE_TYPE_MAP[self._own] if self._own else ""
            self._scoring = ScoringIOProcessors[kind](config, engine.renderer, ChatTemplateConfig())

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What this model does."""
        found = {self._own, "score" if self._scoring else None}
        return tuple(task for task in TASKS if task in found)

    def prepare(self, asked: EngineRequest) -> Prepared:
        """The answer to a request, and its parts; raises `InvalidRequest` where none can run."""
        request = asked.assignment.request
        params = msgspec.structs.asdict(request.pooling)
        cut = params.pop("truncate_prompt_tokens")
        named = (params["step_tag_id"], *(params["returned_token_ids"] or ()))
        ids = [one for one in named if one is not None]
        check_ids("params.returned_token_ids", ids, self._vocab_size)
        pooling = PoolingParams(**params, task=self._own)
        try:
            pooling.clone().verify(self._model)
        except Exception as error:  # vLLM's validation errors have no common base class
            raise InvalidRequest("params", reason_of(error)) from error
        tokenization = {} if cut is None else {"truncate_prompt_tokens": cut}
        if request.task == "score":
            return self._prepare_score(asked, pooling, tokenization)
        inputs = request.inputs or [_only_input(asked)]
        answer, parts = PoolingAnswer(asked, len(inputs)), []
        for index, one in enumerate(inputs):
            try:
                parts.append(self._part(answer, index, one, pooling, tokenization))
            except InvalidRequest as error:
                answer.refuse(index, error.message)
        return answer, parts

    def _part(
        self,
        answer: PoolingAnswer,
        index: int,
        one: Input,
        params: PoolingParams,
        tokenization: dict[str, Any],
    ) -> PooledPart:
        name = answer.field_of(index)
        prompt: Any = one
        if not isinstance(one, str):
            ids, boundary = _joined(one)
            check_ids(name, ids, self._vocab_size)
            prompt = {"prompt_token_ids": ids}
            if boundary and not self._has_token_types:
                why = "this model does not tell the texts of a pair apart; give one array of ids"
                raise InvalidRequest(name, why)
            if boundary:
                params = params.clone()
                params.extra_kwargs = {"compressed_token_type_ids": boundary}
        salt = answer.asked.assignment.request.prefix_salt
        try:
            [rendered] = self._renderer.render_cmpl(
                [parse_model_prompt(self._model, prompt)],
                self._renderer.default_cmpl_tok_params.with_kwargs(**tokenization),
                prompt_extras={"cache_salt": salt} if salt else None,
            )
        except Exception as error:  # as above
            raise InvalidRequest(name, reason_of(error)) from error
        return PooledPart(answer, index, rendered, params)

    def _prepare_score(
        self, asked: EngineRequest, params: PoolingParams, tokenization: dict[str, Any]
    ) -> Prepared:
        request, scoring = asked.assignment.request, self._scoring
        if scoring is None:
            raise InvalidRequest("task", "this model gives no single score")
        documents: list[Any] = [*(request.inputs or ())] or [request.prompt or ""]
        answer, parts = PoolingAnswer(asked, len(documents), partial(_scores, scoring)), []
        context = OfflineScoringInputsContext(
            pooling_task=scoring.pooling_task,
            scoring_data=scoring.valid_inputs(request.query, documents),
            pooling_params=params.clone(),
            tokenization_kwargs=tokenization,
            lora_request=None,
            chat_template=None,
            priorities=None,
        )
        factory, count = scoring.get_request_factory_offline(context)
        answer.has_query = count > len(documents)  # a cross-encoder sees both texts at once
        for index, one in enumerate(factory(), QUERY if answer.has_query else 0):
            try:
                made = scoring.render(one)
                parts.append(PooledPart(answer, index, made["prompts"], made["params"]))
            except Exception as error:  # noqa: BLE001 - whatever vLLM's processor raises
                answer.refuse(index, reason_of(error))
        return answer, parts


def _scores(
    scoring: ScoringIOProcessor, outputs: list[PoolingRequestOutput]
) -> list[PoolingRequestOutput]:
    return scoring.post_process_offline(OfflineOutputsContext(outputs=outputs, n_queries=1))


def _only_input(asked: EngineRequest) -> Input:
    """The one input of a request that has no ``inputs``."""
    request = asked.assignment.request
    if request.tokens is not None:
        return list[Any](unpack_tokens(request.tokens))
    return request.prompt if request.prompt is not None else list[Any](asked.prompt)


def _joined(ids: list[Any]) -> tuple[list[int], int]:
    """Token ids, those of a pair one behind the other, and where its second half begins (0: none).

    A model such as BERT gives tokens from there on another type.
    """
    if not isinstance(ids[0], list):
        return ids, 0
    first, second = ids
    return [*first, *second], len(first)
