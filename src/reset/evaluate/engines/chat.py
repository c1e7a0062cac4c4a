"""From messages to prompt tokens by a tokenizer's chat template, thinking mode included.

Shared by the engines that run a model here; a server does this itself.
"""

from __future__ import annotations

import hashlib
from typing import Any

from reset.evaluate.engines import Request

_SWITCH = "enable_thinking"


def check_thinking(tokenizer: Any, thinking: bool | None) -> None:
    """Refuses a thinking switch that the chat template would silently ignore.

    Raises:
        ValueError: `thinking` is set and the template has no such switch.
    """
    if thinking is not None and _SWITCH not in _template(tokenizer):
        raise ValueError(
            f"this model's chat template has no {_SWITCH} switch; leave --thinking and "
            "--no-thinking out, the model then does as its template says"
        )


def template_sha256(tokenizer: Any) -> str | None:
    """Identity of the chat template; None if there is none."""
    text = _template(tokenizer)
    return hashlib.sha256(text.encode()).hexdigest() if text else None


def prompt_text(tokenizer: Any, request: Request, thinking: bool | None) -> str:
    """The prompt with the template's own tokens; without a template the user's text alone.

    Raises:
        ValueError: a system prompt, and no template to put it into.
    """
    if not _template(tokenizer):
        if any(role != "user" for role, _ in request.messages):
            raise ValueError(
                "this model has no chat template, so a system prompt has no place; leave it out"
            )
        return "\n\n".join(content for _, content in request.messages)
    switch = {} if thinking is None else {_SWITCH: thinking}
    text: str = tokenizer.apply_chat_template(
        request.chat(), tokenize=False, add_generation_prompt=True, **switch
    )
    return text


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of what `prompt_text` gave; a template writes its own special tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=not _template(tokenizer))["input_ids"]
    return ids


def _template(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default", "")
    return template or ""
