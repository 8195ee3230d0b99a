"""vLLM as a chat processor (``dynamo.frontend.vllm_processor``), the extra ``vllm``.

vLLM's renderer makes prompts, its detokenizer makes text, its parsers read thoughts and calls; a worker gets tokens and
gives tokens. vLLM is imported only where it is needed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_es.errors import InvalidArgument
from dynamo_es.frontend.chat_choices import Choice, openai_logprobs
from dynamo_es.frontend.chat_envelopes import backend_invalid_argument_to_http_error
from dynamo_es.frontend.chat_generator import ChatGenerator
from dynamo_es.frontend.chat_processing import Flush, ProcessedChat
from dynamo_es.frontend.extras import import_extra
from dynamo_es.frontend.guidance import StructuralTags, runtime_structural_tag_options
from dynamo_es.frontend.pipeline import TokenLogprob
from dynamo_es.frontend.prepost import PreprocessResult, StreamingPostProcessor, preprocess_chat_request
from dynamo_es.frontend.processor_factory import ModelFolder, ProcessorConfig, stream_interval
from dynamo_es.frontend.processor_requests import chat_settings, processed_request
from dynamo_es.frontend.python_engine import PythonAsyncEngine, RoutedEngine
from dynamo_es.frontend.thinking import runtime_default_thinking_mode
from dynamo_es.http_error import HttpError
from dynamo_es.models.deployment_card import ModelCardInstanceId, ModelDeploymentCard

if TYPE_CHECKING:
    from vllm.reasoning import ReasoningParser
    from vllm.tokenizers import TokenizerLike
    from vllm.tool_parsers import ToolParser
    from vllm.v1.engine import EngineCoreRequest, FinishReason
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

logger = logging.getLogger(__name__)

_STREAM_INTERVAL = "DYN_VLLM_STREAM_INTERVAL"
_FINISHES = {"eos": "STOP", "stop": "STOP", "length": "LENGTH", "cancelled": "ABORT"}
_BEGINNINGS = {"error": "ERROR", "abort": "ABORT", "content_filter": "STOP"}
_SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def finish_reason_name(raw_reason: str | None) -> str | None:
    """Name of vLLM's finish reason for a worker's; None for none, and for one that is not known."""
    if raw_reason is None:
        return None
    for beginning, name in _BEGINNINGS.items():
        if raw_reason.startswith(beginning):
            return name
    found = _FINISHES.get(raw_reason)
    if found is None:
        logger.warning("a worker's finish reason is not known: %r", raw_reason[:64])
    return found


def map_finish_reason(raw_reason: str | None) -> FinishReason | None:
    """vLLM's finish reason for a worker's; None for none, and for one that is not known."""
    name = finish_reason_name(raw_reason)
    if name is None:
        return None
    found: FinishReason = import_extra("vllm.v1.engine", "vllm").FinishReason[name]
    return found


def check_logprobs(request: Mapping[str, Any]) -> None:
    """Refuse what a chat request cannot ask for.

    Raises:
        HttpError: 400.
    """
    logprobs, top = request.get("logprobs"), request.get("top_logprobs")
    if logprobs is not None and not isinstance(logprobs, bool):
        raise HttpError(400, "Validation: `logprobs` must be a boolean; say with `top_logprobs` how many you want")
    if top is None:
        return
    if isinstance(top, bool) or not isinstance(top, int) or top < 0:
        raise HttpError(400, "Validation: `top_logprobs` must be a whole number from 0 on")
    if not logprobs:
        raise HttpError(400, "Validation: `top_logprobs` needs `logprobs` to be true")


class _Output:
    """All choices of one request through vLLM's detokenizer and parsers."""

    def __init__(
        self,
        outputs: OutputProcessor,
        requests: Sequence[EngineCoreRequest],
        posts: Sequence[StreamingPostProcessor],
        decode: Callable[[int], str],
    ) -> None:
        self._outputs = outputs
        self._requests = requests
        self._posts = posts
        self._decode = decode
        self._left = set(range(len(posts)))
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        for request in requests:
            outputs.add_request(request, None)

    def push(self, frame: Mapping[str, Any]) -> Flush | None:
        index = frame.get("index") or 0
        tokens = len(frame.get("token_ids") or ())
        if index not in self._left:
            return Flush((), tokens)
        finish = map_finish_reason(frame.get("finish_reason"))
        self._keep_logprobs(index, frame)
        choices: list[Choice] = []
        stop, over = None, False
        for ids, reason in self._steps(index, list(frame.get("token_ids") or ()), finish):
            made, over, stop = self._processed(index, ids, reason, frame.get("stop_reason"))
            choices += made
            if over:
                break
        if over:
            self._left.discard(index)
        return Flush(choices, tokens, not self._left, not self._left and finish is None, stop)

    def finish(self) -> Flush | None:
        return None

    def _steps(
        self, index: int, ids: list[int], finish: FinishReason | None
    ) -> list[tuple[list[int], FinishReason | None]]:
        """vLLM takes the last token of a stopped output for the one that stopped it; a worker's need not be that."""
        params = self._requests[index].sampling_params
        assert params is not None
        if finish is not None and ids and ids[-1] not in params.all_stop_token_ids:
            return [(ids, None), ([], finish)]
        return [(ids, finish)]

    def _processed(
        self, index: int, ids: list[int], finish: FinishReason | None, stop_reason: Any
    ) -> tuple[list[Choice], bool, str | None]:
        """Choices, whether this choice is over, and the stop string that ended it."""
        core = import_extra("vllm.v1.engine", "vllm").EngineCoreOutput(
            request_id=self._requests[index].request_id,
            new_token_ids=ids,
            finish_reason=finish,
            stop_reason=stop_reason,
        )
        choices, over, stop = [], False, None
        for told in self._outputs.process_outputs([core]).request_outputs:
            for completion in told.outputs:
                over = over or completion.finish_reason is not None
                if isinstance(completion.stop_reason, str):
                    stop = completion.stop_reason
                choice = self._posts[index].process_output(completion)
                if choice is not None:
                    choices.append(self._with_logprobs(index, choice))
        return choices, over, stop

    def _keep_logprobs(self, index: int, frame: Mapping[str, Any]) -> None:
        values, tops = frame.get("log_probs") or (), frame.get("top_logprobs") or ()
        kept = self._logprobs.setdefault(index, [])
        for place, (token_id, value) in enumerate(zip(frame.get("token_ids") or (), values, strict=False)):
            kept.append(TokenLogprob(token_id, value, tops[place] if place < len(tops) else ()))

    def _with_logprobs(self, index: int, choice: Choice) -> Choice:
        kept = self._logprobs.pop(index, None)
        return {**choice, "index": index, "logprobs": openai_logprobs(kept, self._decode) if kept else None}


class VllmProcessor(ChatGenerator):
    """Prepares chat requests of one model and reads their output, as vLLM does.

    Args:
        tokenizer: The model's.
        input_processor: vLLM's, of the model, with its renderer.
        output_processor: vLLM's; every request gets one of its own like it, so that nothing outlives the request.
        tool_parser_class: vLLM's parser of calls, or None.
        reasoning_parser_class: vLLM's parser of thoughts, or None.
        routed_engine: Takes worker requests.
        block_size: Tokens a KV block of the model's workers; the router knows it by itself.
        enable_auto_tool_choice: Whether the model may call where a request does not demand it.
        default_chat_template_kwargs: Variables of the template that requests may override.
        default_thinking_mode: ``enabled``, ``disabled`` or None.
        structural_tag_mode, structural_tag_scope, structural_tag_schema: See ``guidance.StructuralTags``.
        excludes_tools: Templates see no tools if none may be called.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        tool_parser_class: type[ToolParser] | None,
        reasoning_parser_class: type[ReasoningParser] | None,
        routed_engine: RoutedEngine,
        block_size: int = 16,
        enable_auto_tool_choice: bool = False,
        default_chat_template_kwargs: dict[str, Any] | None = None,
        default_thinking_mode: str | None = None,
        structural_tag_mode: str = "off",
        structural_tag_scope: str = "auto",
        structural_tag_schema: str = "auto",
        *,
        excludes_tools: bool = True,
        **parts: Any,
    ) -> None:
        super().__init__(routed_engine, **parts)
        self.tokenizer = tokenizer
        self.block_size = block_size
        self._inputs = input_processor
        self._outputs = output_processor
        self._tool_parser_class = tool_parser_class
        self._reasoning_parser_class = reasoning_parser_class
        self._auto_tools = enable_auto_tool_choice
        self._variables = default_chat_template_kwargs
        self._thinking = default_thinking_mode
        self._tags = StructuralTags(structural_tag_mode, structural_tag_scope, structural_tag_schema)
        self._excludes_tools = excludes_tools

    def close(self) -> None:
        """End the renderer's threads."""
        self._inputs.renderer.shutdown()

    def _engine_error(self, error: Exception) -> Exception:
        return backend_invalid_argument_to_http_error(error) or error

    async def _prepare(self, request: dict[str, Any]) -> ProcessedChat:
        check_logprobs(request)
        settings = chat_settings(request)
        made = await preprocess_chat_request(
            request,
            tokenizer=self.tokenizer,
            renderer=self._inputs.renderer,
            tool_parser_class=self._tool_parser_class,
            exclude_tools_when_tool_choice_none=self._excludes_tools,
            enable_auto_tool_choice=self._auto_tools,
            default_chat_template_kwargs=self._variables,
            default_thinking_mode=self._thinking,
            structural_tag_mode=self._tags.mode,
            structural_tag_scope=self._tags.scope,
            structural_tag_schema=self._tags.schema,
            reasoning_parser_class=self._reasoning_parser_class,
        )
        core = await self._core_request(made)
        params = core.sampling_params
        assert params is not None
        eos = sorted(params.all_stop_token_ids - set(params.stop_token_ids or ()))
        worker_request = processed_request(
            settings,
            request,
            token_ids=made.prompt_token_ids,
            eos_token_ids=eos,
            guided_decoding=made.guided_decoding,
            sampling_defaults=_sampling_defaults(params, settings.n or 1),
        )
        worker_request["stop_conditions"]["max_tokens"] = params.max_tokens
        worker_request["output_options"]["skip_special_tokens"] = params.skip_special_tokens
        posts = [self._post(made, params, bool(request.get("stream"))) for _ in range(settings.n or 1)]
        _tell_reasoning(worker_request, posts[0].reasoning_ended, made.chat_template_kwargs)
        return ProcessedChat(worker_request, functools.partial(self._output, core, posts))

    async def _core_request(self, made: PreprocessResult) -> EngineCoreRequest:
        """vLLM's request of one choice, which its detokenizer and its checks of prompt and sampling need."""
        kinds = import_extra("vllm.sampling_params", "vllm").RequestOutputKind
        errors = import_extra("vllm.exceptions", "vllm")
        asked = made.request_for_sampling
        limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        single = asked.model_copy(update={"n": 1, "logprobs": False, "top_logprobs": None, "prompt_logprobs": None})
        try:
            params = single.to_sampling_params(limit, self._inputs.model_config.get_diff_sampling_param())
            params.output_kind = kinds.DELTA
            core: EngineCoreRequest = await self._inputs.process_inputs_async(
                self._new_id(), made.engine_prompt, params, import_extra("vllm.tasks", "vllm").GENERATION_TASKS
            )
        except (errors.VLLMClientError, ValueError) as error:
            raise InvalidArgument(f"Validation: {error}") from error
        return core

    def _post(self, made: PreprocessResult, params: Any, streams: bool) -> StreamingPostProcessor:
        return StreamingPostProcessor(
            tokenizer=self.tokenizer,
            request_for_sampling=made.request_for_sampling,
            sampling_params=params,
            prompt_token_ids=made.prompt_token_ids,
            tool_parser=made.tool_parser,
            reasoning_parser_class=self._reasoning_parser_class,
            chat_template_kwargs=made.chat_template_kwargs,
            stream_response=streams,
            reads_demanded=made.uses_dynamo_json_tool_call_fallback,
        )

    def _output(self, core: EngineCoreRequest, posts: Sequence[StreamingPostProcessor]) -> _Output:
        requests = []
        for _ in posts:
            choice = msgspec.structs.replace(core, request_id=self._new_id())
            self._inputs.assign_request_id(choice)
            requests.append(choice)
        outputs = type(self._outputs)(
            self._outputs.tokenizer, log_stats=False, stream_interval=self._outputs.stream_interval
        )
        return _Output(outputs, requests, posts, lambda token_id: str(self.tokenizer.decode([token_id])))


def _sampling_defaults(params: Any, n: int) -> dict[str, Any]:
    """Sampling options as vLLM settled them: the request's, the model's generation settings', OpenAI's."""
    result: dict[str, Any] = {"n": n, **{name: getattr(params, name) for name in _SAMPLED}}
    if params.top_k > 0:
        result["top_k"] = params.top_k
    if params.min_p > 0:
        result["min_p"] = params.min_p
    return result


def _tell_reasoning(request: dict[str, Any], ended: bool | None, variables: Mapping[str, Any]) -> None:
    """Tell vLLM's workers whether the output begins within a thought: what binds it begins after that."""
    if ended is None:
        return
    request["extra_args"] = {
        **request.get("extra_args", {}),
        "reasoning_ended": ended,
        "reasoning_parser_kwargs": {"chat_template_kwargs": dict(variables)},
    }


class EngineFactory:
    """Makes the chat engines of models with vLLM as their processor.

    Args:
        config: Of the frontend.
        flags: vLLM's own: ``tool_call_parser``, ``reasoning_parser``, ``enable_auto_tool_choice`` and
            ``chat_template_kwargs`` if they are given; what is not is the model's card's.
        env: Where ``DYN_VLLM_STREAM_INTERVAL`` is looked for.
    """

    def __init__(
        self,
        config: ProcessorConfig,
        flags: Namespace,
        *,
        env: Mapping[str, str] | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._flags = flags
        self._env = env
        self._now_s = now_s

    async def chat_engine_factory(
        self, instance_id: ModelCardInstanceId, mdc: ModelDeploymentCard, routed_engine: RoutedEngine
    ) -> PythonAsyncEngine:
        """The chat engine of a model that was found.

        Raises:
            RuntimeError: It serves no chat, its directory is not here, or preprocess workers are asked for.
            MissingExtra: vLLM is not installed.
        """
        processor = await self.build_processor(mdc, routed_engine)
        return PythonAsyncEngine(processor.generator, asyncio.get_running_loop())

    async def build_processor(
        self, mdc: ModelDeploymentCard, routed_engine: RoutedEngine, folder: str | None = None
    ) -> VllmProcessor:
        """The same as a processor; ``folder``: the model's directory, if it is another than its card says."""
        files = ModelFolder(mdc, folder)
        if self._config.preprocess_workers != 0:
            raise RuntimeError("--dyn-preprocess-workers is not for the vLLM chat processor: it has threads of its own")
        runtime = mdc.runtime_config()
        interval = stream_interval(_STREAM_INTERVAL, runtime, self._env)
        inputs, outputs = await asyncio.to_thread(_load_vllm, files.path, self._config.trust_remote_code, interval)
        tool_parser = self._flag("tool_call_parser") or files.named("tool_call_parser")
        reasoning_parser = self._flag("reasoning_parser") or files.named("reasoning_parser")
        tags = runtime_structural_tag_options(runtime)
        return VllmProcessor(
            inputs.get_tokenizer(),
            inputs,
            outputs,
            _named_parser("vllm.tool_parsers", "ToolParserManager", "get_tool_parser", tool_parser),
            _named_parser("vllm.reasoning", "ReasoningParserManager", "get_reasoning_parser", reasoning_parser),
            routed_engine,
            enable_auto_tool_choice=bool(self._flag("enable_auto_tool_choice")) or tool_parser is not None,
            default_chat_template_kwargs=self._flag("default_chat_template_kwargs"),
            default_thinking_mode=runtime_default_thinking_mode(runtime),
            structural_tag_mode=tags.mode,
            structural_tag_scope=tags.scope,
            structural_tag_schema=tags.schema,
            excludes_tools=self._config.exclude_tools_when_tool_choice_none,
            now_s=self._now_s,
        )

    def _flag(self, name: str) -> Any:
        return getattr(self._flags, name, None)


def _named_parser(module: str, manager: str, getter: str, name: str | None) -> Any:
    if name is None:
        return None
    try:
        return getattr(getattr(import_extra(module, "vllm"), manager), getter)(name)
    except (KeyError, ValueError) as error:
        raise RuntimeError(f"vLLM has no parser {name!r}") from error


def _load_vllm(folder: str, trust_remote_code: bool, interval: int) -> tuple[InputProcessor, OutputProcessor]:
    """vLLM's processors of a model, from its small files alone: no weights are read."""
    config = import_extra("vllm.config", "vllm")
    inputs = import_extra("vllm.v1.engine.input_processor", "vllm").InputProcessor
    outputs = import_extra("vllm.v1.engine.output_processor", "vllm").OutputProcessor
    model = config.ModelConfig(model=folder, tokenizer=folder, trust_remote_code=trust_remote_code)
    settings = config.VllmConfig(model_config=model, load_config=config.LoadConfig(load_format="dummy"))
    made = inputs(settings)
    return made, outputs(made.get_tokenizer(), log_stats=False, stream_interval=interval)
