# SPDX-License-Identifier: Apache-2.0
"""Turns a conversation into the text that a model was trained on, by the checkpoint's Jinja template."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tensorrt_llm.llmapi.checkpoint import CHAT_TEMPLATE_FILE


class TemplateRefusal(ValueError):
    """The template itself rejects the conversation (`raise_exception` in the template)."""


class ChatTemplate:
    """A compiled template, run in a sandbox on messages, add_generation_prompt and values of the caller."""

    def __init__(self, source: str, *, name: str) -> None:
        """`name` is for messages. Raises ValueError if the source is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template {name}, line {error.lineno}: {error.message}") from None
        self._name = name

    @classmethod
    def find(cls, checkpoint: Path, override: str | None = None) -> "ChatTemplate | None":
        """The template of `override` (a file, or the template itself), else the checkpoint's, else None."""
        if override is not None:
            return cls._from_option(override)
        file = checkpoint / CHAT_TEMPLATE_FILE
        return cls(file.read_text(encoding="utf-8"), name=str(file)) if file.is_file() else None

    @classmethod
    def _from_option(cls, option: str) -> "ChatTemplate":
        is_source = "{" in option or "\n" in option
        if is_source:
            return cls(option, name="of --chat_template")
        if not Path(option).is_file():
            raise ValueError(f"chat template {option!r}: there is no such file")
        return cls(Path(option).read_text(encoding="utf-8"), name=option)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text. Raises ValueError if the template refuses it or cannot read it."""
        context = {**(values or {}), "messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(context)
        except TemplateRefusal as refusal:
            raise ValueError(f"the chat template refuses the messages: {refusal}") from None
        # A template is a program and messages are its input: what it trips over is told to the client.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ValueError(f"chat template {self._name} cannot render the messages: {error}") from None


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _to_json(value: object, indent: int | None = None) -> str:
    """JSON as model templates expect it: no HTML escapes, letters of all scripts as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
