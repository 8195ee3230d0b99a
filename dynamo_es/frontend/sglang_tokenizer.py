"""The tokenizer that SGLang uses for a model. Does I/O; call it off the event loop."""

from __future__ import annotations

from typing import Any

from dynamo_es.frontend.extras import import_extra
from dynamo_es.frontend.utils import resolve_chat_template


def load_sglang_tokenizer(folder: str, *, trust_remote_code: bool, template: str | None) -> Any:
    """SGLang's tokenizer of a model directory, with its chat template.

    Args:
        folder: The directory.
        trust_remote_code: Whether code in it may run.
        template: Text of a chat template to use instead of the model's; None: the model's.

    Raises:
        MissingExtra: SGLang is not installed.
    """
    module = import_extra("sglang.srt.utils.hf_transformers_utils", "sglang")
    tokenizer = module.get_tokenizer(folder, trust_remote_code=trust_remote_code)
    if template is not None:
        tokenizer.chat_template = template
    elif not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = resolve_chat_template(folder, backend="sglang")
    return tokenizer
