"""The names of the parsers, for options; ``registry.py`` has what they stand for. Imports nothing."""

from __future__ import annotations

# fmt: off
TOOL_PARSER_NAMES = (
    "deepseek-v4", "deepseek_v3", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4", "deepseek_v41", "deepseekv4",
    "default", "gemma-4", "gemma4", "glm45", "glm47", "harmony", "hermes", "inkling", "jamba", "kimi-k3", "kimi_k2",
    "kimi_k25", "kimi_k3", "llama3_json", "minimax-m3", "minimax-m3-nom", "minimax_m2", "minimax_m3",
    "minimax_m3_nom", "mistral", "muse", "muse_glimmer", "nemotron_deci", "nemotron_nano", "phi4", "pythonic",
    "qwen25", "qwen3", "qwen3_coder",
)
REASONING_PARSER_NAMES = (
    "basic", "deepseek-v4", "deepseek_r1", "deepseek_v3", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4",
    "deepseek_v41", "deepseekv4", "gemma-4", "gemma4", "glm45", "glm47", "gpt_oss", "granite", "inkling", "kimi",
    "kimi-k3", "kimi_k2", "kimi_k25", "kimi_k3", "minimax-m3", "minimax_append_think", "minimax_m2", "minimax_m3",
    "mistral", "muse", "muse_glimmer", "nemotron3", "nemotron_deci", "nemotron_nano", "nemotron_v3", "qwen3",
    "qwen3_coder", "step3",
)
# fmt: on
