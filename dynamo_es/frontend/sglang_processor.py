"""SGLang as a chat processor (``dynamo.frontend.sglang_processor``), the extra ``sglang``.

The processor renders and tokenizes as SGLang does and reads output by SGLang's parsers; a worker gets tokens and gives
tokens. Preparing runs on a thread, or in processes of their own (``--dyn-preprocess-workers``).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dynamo_es.errors import InvalidArgument
from dynamo_es.frontend.chat_envelopes import media_counts
from dynamo_es.frontend.chat_generator import ChatGenerator
from dynamo_es.frontend.chat_processing import Flush, ProcessedChat
from dynamo_es.frontend.guidance import Constraint
from dynamo_es.frontend.pipeline import OutputOptions
from dynamo_es.frontend.processor_factory import (
    ModelFolder,
    ProcessorConfig,
    checked_template,
    stream_interval,
    warmed_up_pool,
)
from dynamo_es.frontend.processor_requests import chat_settings, output_options, processed_request
from dynamo_es.frontend.python_engine import PythonAsyncEngine, RoutedEngine
from dynamo_es.frontend.sglang_prepost import (
    SglangPreprocessResult,
    SglangStreamingPostProcessor,
    convert_tools,
    create_parsers,
    detect_force_reasoning_from_template,
    preprocess_chat_request,
)
from dynamo_es.frontend.sglang_tokenizer import load_sglang_tokenizer
from dynamo_es.frontend.thinking import runtime_default_thinking_mode
from dynamo_es.frontend.utils import extract_mm_urls
from dynamo_es.models.deployment_card import ModelCardInstanceId, ModelDeploymentCard

logger = logging.getLogger(__name__)

_STREAM_INTERVAL = "DYN_SGLANG_STREAM_INTERVAL"
_SAMPLING_DEFAULTS: Mapping[str, Any] = {
    "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip


@dataclass
class SglangPreprocessWorkerResult:
    """What a preprocess worker hands back; it crosses processes, so parsers are made anew from it.

    Attributes:
        prompt_token_ids: The prompt.
        dynamo_preproc: The worker request.
        request: The client's, with the thinking variables that apply.
        force_reasoning: The output begins within a thought.
        effective_reasoning_parser_name: Parser of thoughts that reads the output, or None.
        named_zero_arg_tool: See ``SglangPreprocessResult``.
    """

    prompt_token_ids: list[int]
    dynamo_preproc: dict[str, Any]
    request: dict[str, Any]
    force_reasoning: bool = False
    effective_reasoning_parser_name: str | None = None
    named_zero_arg_tool: str | None = None


@dataclass(frozen=True, slots=True)
class _Model:
    """How the requests of one model are prepared. Crosses processes."""

    tool_call_parser: str | None
    reasoning_parser: str | None
    eos_token_ids: tuple[int, ...]
    template_force_reasoning: bool
    default_thinking_mode: str | None
    excludes_tools: bool


@dataclass(slots=True)
class _Prepared:
    """A request after ``preprocess_chat_request``, with its worker request."""

    result: SglangPreprocessResult
    worker_request: dict[str, Any]
    options: OutputOptions = field(default_factory=OutputOptions)


def _prepared(request: dict[str, Any], tokenizer: Any, model: _Model) -> _Prepared:
    if request.get("n", 1) not in (None, 1):
        raise InvalidArgument(f"Unsupported value: 'n={request['n']}'. This endpoint currently supports only n=1.")
    _check_media(request)
    settings = chat_settings(request)
    result = preprocess_chat_request(
        request,
        tokenizer=tokenizer,
        tool_call_parser_name=model.tool_call_parser,
        reasoning_parser_name=model.reasoning_parser,
        exclude_tools_when_tool_choice_none=model.excludes_tools,
        template_force_reasoning=model.template_force_reasoning,
        default_thinking_mode=model.default_thinking_mode,
    )
    worker_request = processed_request(
        settings,
        request,
        token_ids=result.prompt_token_ids,
        eos_token_ids=model.eos_token_ids,
        guided_decoding=result.guided_decoding,
        sampling_defaults=_SAMPLING_DEFAULTS,
    )
    reads = result.tool_call_parser is not None or result.reasoning_parser is not None
    worker_request["output_options"]["skip_special_tokens"] = not reads and settings.skip_special_tokens is not False
    # SGLang's workers then let the thoughts come before what is bound.
    thinks = result.reasoning_parser is not None and result.force_reasoning
    worker_request["require_reasoning"] = thinks and result.guided_decoding is not None
    return _Prepared(result, worker_request, output_options(settings, model.eos_token_ids))


def _check_media(request: Mapping[str, Any]) -> None:
    try:
        _, uuids = extract_mm_urls(request.get("messages") or ())
    except ValueError as error:
        raise InvalidArgument(str(error)) from error
    if uuids is not None:
        raise InvalidArgument("Cache UUIDs are supported only by the vLLM backend")


@functools.cache
def _tokenizer_of_process(folder: str, trust_remote_code: bool, template: str | None) -> Any:
    """A preprocess worker's tokenizer, loaded once a process."""
    return load_sglang_tokenizer(folder, trust_remote_code=trust_remote_code, template=template)


def _prepare_in_worker(
    request: dict[str, Any], source: tuple[str, bool, str | None], model: _Model
) -> SglangPreprocessWorkerResult:
    made = _prepared(request, _tokenizer_of_process(*source), model)
    return SglangPreprocessWorkerResult(
        made.result.prompt_token_ids,
        made.worker_request,
        made.result.request,
        made.result.force_reasoning,
        model.reasoning_parser if made.result.reasoning_parser is not None else None,
        made.result.named_zero_arg_tool,
    )


class _Output:
    """Several frames' tokens at once through the post-processor: the first at once, then by the interval."""

    def __init__(self, post: SglangStreamingPostProcessor, interval: int) -> None:
        self._post = post
        self._interval = interval
        self._pending: list[Mapping[str, Any]] = []
        self._tokens = 0
        self._first = True
        self._over = False

    def push(self, frame: Mapping[str, Any]) -> Flush | None:
        if self._over:
            return None
        if self._pending and _shape(frame) != _shape(self._pending[0]):
            earlier = self._flush()
            if earlier.over:
                return earlier
            later = self.push(frame)
            return earlier if later is None else _joined(earlier, later)
        self._pending.append(frame)
        self._tokens += len(frame.get("token_ids") or ())
        if self._tokens >= (1 if self._first else self._interval) or frame.get("finish_reason") is not None:
            return self._flush()
        return None

    def finish(self) -> Flush | None:
        return self._flush() if self._pending else None

    def _flush(self) -> Flush:
        tokens, self._tokens = self._tokens, 0
        frames, self._pending = self._pending, []
        self._first = False
        choice = self._post.process_output(_merged(frames))
        self._over = self._post.locally_finished or frames[-1].get("finish_reason") is not None
        choices = () if choice is None else (choice,)
        return Flush(choices, tokens, self._over, self._post.locally_finished, self._post.local_stop_reason)


def _shape(frame: Mapping[str, Any]) -> tuple[bool, bool]:
    return frame.get("log_probs") is not None, frame.get("top_logprobs") is not None


def _merged(frames: list[Mapping[str, Any]]) -> dict[str, Any]:
    merged = dict(frames[-1])
    for name in ("token_ids", "log_probs", "top_logprobs"):
        if merged.get(name) is not None:
            merged[name] = [value for frame in frames for value in frame.get(name) or ()]
    return merged


def _joined(earlier: Flush, later: Flush) -> Flush:
    return later._replace(choices=(*earlier.choices, *later.choices), tokens=earlier.tokens + later.tokens)


class SglangProcessor(ChatGenerator):
    """Prepares chat requests of one model and reads their output, as SGLang does.

    Args:
        tokenizer: The model's, Hugging Face's.
        routed_engine: Takes worker requests.
        tool_call_parser_name: SGLang's parser of calls, or None.
        reasoning_parser_name: SGLang's parser of thoughts, or None.
        eos_token_ids: Ids that end an answer; None: the tokenizer's.
        debug_perf: Log how long preparing took.
        preprocess_pool: Processes that prepare; None: a thread does. ``source`` says what they load.
        preprocess_workers: How many of them.
        stream_interval: Tokens a chunk after the first.
        default_thinking_mode: ``enabled``, ``disabled`` or None.
        excludes_tools: Templates see no tools if none may be called.
        executor: Threads that prepare; None: the loop's own.
        source: Folder, ``trust_remote_code`` and template that the processes' tokenizer comes from.
    """

    def __init__(
        self,
        tokenizer: Any,
        routed_engine: RoutedEngine,
        tool_call_parser_name: str | None,
        reasoning_parser_name: str | None,
        eos_token_ids: list[int] | None,
        debug_perf: bool = False,
        preprocess_pool: ProcessPoolExecutor | None = None,
        preprocess_workers: int = 0,
        stream_interval: int = 1,
        default_thinking_mode: str | None = None,
        *,
        excludes_tools: bool = True,
        executor: Executor | None = None,
        source: tuple[str, bool, str | None] | None = None,
        **parts: Any,
    ) -> None:
        super().__init__(routed_engine, **parts)
        self._tokenizer = tokenizer
        self._interval = stream_interval
        self._debug_perf = debug_perf
        self._executor = executor
        self._source = source
        self.preprocess_pool = preprocess_pool if preprocess_workers > 0 else None
        eos = [tokenizer.eos_token_id] if eos_token_ids is None else eos_token_ids
        self._model = _Model(
            tool_call_parser_name,
            reasoning_parser_name,
            tuple(token_id for token_id in eos if token_id is not None),
            detect_force_reasoning_from_template(getattr(tokenizer, "chat_template", None)),
            default_thinking_mode,
            excludes_tools,
        )

    def close(self) -> None:
        """End the preprocess workers; requests that they hold fail."""
        if self.preprocess_pool is not None:
            self.preprocess_pool.shutdown(wait=False, cancel_futures=True)

    async def _prepare(self, request: dict[str, Any]) -> ProcessedChat:
        loop = asyncio.get_running_loop()
        start = loop.time()
        if self.preprocess_pool is not None and self._source is not None:
            told = await loop.run_in_executor(
                self.preprocess_pool, _prepare_in_worker, request, self._source, self._model
            )
            made = await loop.run_in_executor(self._executor, self._with_parsers, told)
        else:
            made = await loop.run_in_executor(self._executor, _prepared, request, self._tokenizer, self._model)
        if self._debug_perf:
            logger.info(
                "prepared %d tokens in %.1f ms", len(made.result.prompt_token_ids), 1000 * (loop.time() - start)
            )
        media, _ = extract_mm_urls(request.get("messages") or ())
        return ProcessedChat(made.worker_request, functools.partial(self._output, made), media_counts(media))

    def _with_parsers(self, told: SglangPreprocessWorkerResult) -> _Prepared:
        guided: Constraint | None = told.dynamo_preproc["sampling_options"]["guided_decoding"]
        calls, thoughts = create_parsers(
            told.request,
            tool_call_parser_name=self._model.tool_call_parser,
            reasoning_parser_name=told.effective_reasoning_parser_name,
            force_reasoning=told.force_reasoning,
            guided_decoding=guided,
        )
        result = SglangPreprocessResult(
            told.prompt_token_ids, calls, thoughts, guided, told.request, told.force_reasoning,
            told.named_zero_arg_tool,
        )  # fmt: skip
        options = output_options(chat_settings(told.request), self._model.eos_token_ids)
        return _Prepared(result, told.dynamo_preproc, options)

    def _output(self, made: _Prepared) -> _Output:
        request = made.result.request
        post = SglangStreamingPostProcessor(
            tokenizer=self._tokenizer,
            tool_call_parser=made.result.tool_call_parser,
            reasoning_parser=made.result.reasoning_parser,
            history_tool_calls_count=_calls_so_far(request),
            sglang_tools=convert_tools(request.get("tools")),
            tool_call_parser_name=self._model.tool_call_parser,
            eos_token_ids=list(self._model.eos_token_ids),
            prompt_token_ids=made.result.prompt_token_ids,
            options=made.options,
            named_zero_arg_tool=made.result.named_zero_arg_tool,
        )
        return _Output(post, self._interval)


def _calls_so_far(request: Mapping[str, Any]) -> int:
    return sum(len(message.get("tool_calls") or ()) for message in request.get("messages") or ())


class SglangEngineFactory:
    """Makes the chat engines of models with SGLang as their processor.

    Args:
        config: Of the frontend.
        debug_perf: Log how long preparing took.
        tool_call_parser_name: SGLang's parser of calls for all models; None: what each model's card says.
        reasoning_parser_name: The same for thoughts.
        chat_template: A ``.jinja`` file to use instead of the models' own; None: their own.
        env: Where ``DYN_SGLANG_STREAM_INTERVAL`` is looked for.
        executor: Threads that prepare; None: the loop's own.

    Raises:
        ConfigError: ``chat_template`` is no such file.
    """

    def __init__(
        self,
        config: ProcessorConfig,
        debug_perf: bool = False,
        tool_call_parser_name: str | None = None,
        reasoning_parser_name: str | None = None,
        chat_template: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        executor: Executor | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._debug_perf = debug_perf
        self._tool_call_parser = tool_call_parser_name
        self._reasoning_parser = reasoning_parser_name
        self._template = None if chat_template is None else checked_template(chat_template)
        self._env = env
        self._executor = executor
        self._now_s = now_s

    async def chat_engine_factory(
        self, instance_id: ModelCardInstanceId, mdc: ModelDeploymentCard, routed_engine: RoutedEngine
    ) -> PythonAsyncEngine:
        """The chat engine of a model that was found.

        Raises:
            RuntimeError: It serves no chat, its directory is not here, or the preprocess workers do not start.
            MissingExtra: SGLang is not installed.
        """
        processor = await self.build_processor(mdc, routed_engine)
        return PythonAsyncEngine(processor.generator, asyncio.get_running_loop())

    async def build_processor(
        self, mdc: ModelDeploymentCard, routed_engine: RoutedEngine, folder: str | None = None
    ) -> SglangProcessor:
        """The same as a processor; ``folder``: the model's directory, if it is another than its card says."""
        files = ModelFolder(mdc, folder)
        trusts = self._config.trust_remote_code
        source = (files.path, trusts, self._template)
        # Not on the threads of requests: it may take a minute.
        tokenizer = await asyncio.to_thread(
            load_sglang_tokenizer, files.path, trust_remote_code=trusts, template=self._template
        )
        workers = self._config.preprocess_workers
        runtime = mdc.runtime_config()
        return SglangProcessor(
            tokenizer,
            routed_engine,
            self._tool_call_parser or files.named("tool_call_parser"),
            self._reasoning_parser or files.named("reasoning_parser"),
            files.eos_token_ids(tokenizer.get_vocab()),
            self._debug_perf,
            await warmed_up_pool(workers) if workers > 0 else None,
            workers,
            stream_interval(_STREAM_INTERVAL, runtime, self._env),
            runtime_default_thinking_mode(runtime),
            excludes_tools=self._config.exclude_tools_when_tool_choice_none,
            executor=self._executor,
            source=source,
            now_s=self._now_s,
        )
