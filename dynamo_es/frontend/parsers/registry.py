"""The names by which model cards call their parsers (``tool_call_parser``, ``reasoning_parser``), and their formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dynamo_es.frontend.parsers import gemma4, harmony, inkling, kimi_k3, minimax_m3, muse, pythonic
from dynamo_es.frontend.parsers.json_blocks import JsonBlocks
from dynamo_es.frontend.parsers.schema import ToolSchemas
from dynamo_es.frontend.parsers.sections import Sections
from dynamo_es.frontend.parsers.tags import KeyValueTags, Tags
from dynamo_es.frontend.parsers.tape import Step, Tape
from dynamo_es.frontend.parsers.think import Marks


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """A format in which thoughts, text and calls are messages of one kind, so that one grammar reads all of them.

    Attributes:
        grammar: Coroutine for (tape, reasoning, tools, thinking): what is told apart, and whether the text begins
            within a thought.
        markers: All strings with a meaning.
        opens: A prompt that ends so ends within a thought.
    """

    grammar: Callable[[Tape, bool, bool, bool], Step[None]]
    markers: tuple[str, ...]
    opens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of calls within text.

    Attributes:
        grammar: Its coroutine, for a request's tools.
        markers: All strings with a meaning.
        interrupts: Strings that end a thought without its own mark, if the thought has no opening mark either.
    """

    grammar: Callable[[Tape, ToolSchemas], Step[None]]
    markers: tuple[str, ...]
    interrupts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A format of thoughts within text.

    Attributes:
        marks: The format.
        forced: The text begins within a thought, unless the request turns thinking off.
    """

    marks: Marks
    forced: bool = False


def _json(blocks: JsonBlocks, interrupts: tuple[str, ...] = ()) -> ToolFormat:
    return ToolFormat(lambda tape, tools: blocks(tape), blocks.markers, interrupts)


def _section(sections: Sections) -> ToolFormat:
    starts = (*sections.begins, sections.call_begin)
    return ToolFormat(lambda tape, tools: sections(tape), sections.markers, starts)


def _tags(tags: Tags | KeyValueTags, interrupts: tuple[str, ...] = ()) -> ToolFormat:
    return ToolFormat(tags.grammar, tags.markers, interrupts)


def _dsml(block: str, space: str = "") -> ToolFormat:
    mark = "｜DSML｜" + space
    return _tags(
        Tags(
            block_begins=(f"<{mark}{block}>",),
            block_ends=(f"</{mark}{block}>",),
            call_begin=f"<{mark}invoke name=",
            call_end=f"</{mark}invoke>",
            value_begin=f"<{mark}parameter name=",
            value_end=f"</{mark}parameter>",
            json_body=True,
        ),
        interrupts=(f"<{mark}{block}>", f"<{mark}invoke name="),
    )


_HARMONY = ChannelFormat(
    lambda tape, reasoning, tools, thinking: harmony.Harmony(tape, reasoning=reasoning, tools=tools).run(),
    harmony.MARKERS,
)
_KIMI_K3 = ChannelFormat(
    lambda tape, reasoning, tools, thinking: kimi_k3.KimiK3(
        tape, reasoning=reasoning, tools=tools, thinking=thinking
    ).run(),
    kimi_k3.MARKERS,
    (kimi_k3.THINK,),
)
_MUSE = ChannelFormat(
    lambda tape, reasoning, tools, thinking: muse.Muse(tape, reasoning=reasoning, tools=tools).run(),
    muse.MARKERS,
)
_INKLING = ChannelFormat(
    lambda tape, reasoning, tools, thinking: inkling.Inkling(tape, reasoning=reasoning, tools=tools).run(),
    inkling.MARKERS,
)

_HERMES = _json(JsonBlocks(("<tool_call>",), ("</tool_call>",)))
_KIMI_BEGINS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_KIMI_K2 = _section(
    Sections(
        _KIMI_BEGINS,
        ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
        native_ids=True,
    )
)
_DEEPSEEK = (
    ("<｜tool▁calls▁begin｜>",),
    ("<｜tool▁calls▁end｜>",),
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_DSML_V4 = _dsml("tool_calls")
_DSML_V41 = _dsml("calls", " ")
_GLM = _tags(KeyValueTags())
_QWEN3_CODER = _tags(
    Tags(
        ("<tool_call>",),
        ("</tool_call>",),
        "<function=",
        "</function>",
        "<parameter=",
        "</parameter>",
        lines=True,
    ),
    interrupts=("<tool_call>\n<function=",),
)
_MINIMAX_M2 = _tags(
    Tags(
        ("<minimax:tool_call>",),
        ("</minimax:tool_call>",),
        "<invoke name=",
        "</invoke>",
        "<parameter name=",
        "</parameter>",
    ),
    interrupts=("<minimax:tool_call>",),
)
_MINIMAX_M3 = ToolFormat(
    lambda tape, tools: minimax_m3.MinimaxM3(tape, tools).run(),
    minimax_m3.MARKERS,
    (minimax_m3.BLOCK, minimax_m3.INVOKE),
)
_GEMMA4 = ToolFormat(lambda tape, tools: gemma4.gemma4(tape), gemma4.MARKERS, (gemma4.BEGIN,))

TOOL_PARSERS: Mapping[str, ToolFormat | ChannelFormat] = {
    "deepseek_v3": _section(Sections(*_DEEPSEEK, typed=True)),
    "deepseek_v3_1": _section(Sections(*_DEEPSEEK)),
    "deepseek_v3_2": _dsml("function_calls"),
    "deepseek_v4": _DSML_V4,
    "deepseek-v4": _DSML_V4,
    "deepseekv4": _DSML_V4,
    "deepseek_v41": _DSML_V41,
    "default": _json(JsonBlocks(("<TOOLCALL>", "<|python_tag|>"), ("</TOOLCALL>",), bare=True)),
    "gemma4": _GEMMA4,
    "gemma-4": _GEMMA4,
    "glm45": _GLM,
    "glm47": _GLM,
    "harmony": _HARMONY,
    "hermes": _HERMES,
    "inkling": _INKLING,
    "jamba": _json(JsonBlocks(("<tool_calls>",), ("</tool_calls>",))),
    "kimi_k2": _KIMI_K2,
    "kimi_k25": _KIMI_K2,
    "kimi_k3": _KIMI_K3,
    "kimi-k3": _KIMI_K3,
    "llama3_json": _json(JsonBlocks(("<|python_tag|>",), bare=True)),
    "minimax_m2": _MINIMAX_M2,
    "minimax_m3": _MINIMAX_M3,
    "minimax-m3": _MINIMAX_M3,
    "minimax_m3_nom": _MINIMAX_M3,
    "minimax-m3-nom": _MINIMAX_M3,
    "mistral": _json(
        JsonBlocks(("[TOOL_CALLS]",), ("[/TOOL_CALLS]",), bare=True, named=True), interrupts=("[TOOL_CALLS]",)
    ),
    "muse": _MUSE,
    "muse_glimmer": _MUSE,
    "nemotron_deci": _json(JsonBlocks(("<TOOLCALL>",), ("</TOOLCALL>",))),
    "nemotron_nano": _QWEN3_CODER,
    "phi4": _json(JsonBlocks(("functools",))),
    "pythonic": ToolFormat(lambda tape, tools: pythonic.Pythonic(tape, tools).run(), pythonic.MARKERS),
    "qwen25": _HERMES,
    "qwen3": _QWEN3_CODER,
    "qwen3_coder": _QWEN3_CODER,
}
"""By the names of spec/frontend.md 4.4."""

_THINK = ReasoningFormat(Marks())
_FORCED = ReasoningFormat(Marks(), forced=True)
_THINK_V4 = ReasoningFormat(Marks(stops=_DSML_V4.interrupts))
_THINK_KIMI = Marks(stops=_KIMI_BEGINS)
_THINK_M3 = ReasoningFormat(Marks(("<mm:think>",), ("</mm:think>",), stops=(minimax_m3.BLOCK, minimax_m3.INVOKE)))
_THINK_GEMMA4 = ReasoningFormat(Marks(("<|channel>",), ("<channel|>",), label="thought\n"))

_GRANITE = Marks(
    ("Here's my thought process:", "Here is my thought process:"),
    ("Here's my response:", "Here is my response:"),
    once=True,
)

REASONING_PARSERS: Mapping[str, ReasoningFormat | ChannelFormat] = {
    "basic": _THINK,
    "deepseek_r1": _FORCED,
    "deepseek_v3": _FORCED,
    "deepseek_v3_1": _FORCED,
    "deepseek_v3_2": _FORCED,
    "deepseek_v4": _THINK_V4,
    "deepseek-v4": _THINK_V4,
    "deepseekv4": _THINK_V4,
    "deepseek_v41": ReasoningFormat(Marks(stops=_DSML_V41.interrupts)),
    "gemma4": _THINK_GEMMA4,
    "gemma-4": _THINK_GEMMA4,
    "glm45": _THINK,
    "glm47": _THINK,
    "gpt_oss": _HARMONY,
    "granite": ReasoningFormat(_GRANITE),
    "inkling": _INKLING,
    "kimi": ReasoningFormat(Marks(("◁think▷",), ("◁/think▷",))),
    "kimi_k2": ReasoningFormat(_THINK_KIMI),
    "kimi_k25": ReasoningFormat(_THINK_KIMI, forced=True),
    "kimi_k3": _KIMI_K3,
    "kimi-k3": _KIMI_K3,
    "minimax_append_think": _FORCED,
    "minimax_m2": ReasoningFormat(Marks(stops=("<minimax:tool_call>", "<invoke name=")), forced=True),
    "minimax_m3": _THINK_M3,
    "minimax-m3": _THINK_M3,
    "mistral": ReasoningFormat(Marks(("[THINK]", "<think>"), ("[/THINK]", "</think>")), forced=True),
    "muse": _MUSE,
    "muse_glimmer": _MUSE,
    "nemotron3": _FORCED,
    "nemotron_deci": _THINK,
    "nemotron_nano": _FORCED,
    "nemotron_v3": _FORCED,
    "qwen3": _THINK,
    "qwen3_coder": _THINK,
    "step3": _FORCED,
}
"""By the names of spec/frontend.md 4.5."""
