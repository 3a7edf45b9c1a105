# SPDX-License-Identifier: Apache-2.0
"""The chat template that ships with kimi-k3-tiny."""

import ast

from tensorrt_llm._torch.models.auto import resolve_model_folder
from tensorrt_llm.llmapi import Tokenizer
from tensorrt_llm.serve.chat_template import ChatTemplate

FOLDER = resolve_model_folder("kimi-k3-tiny")
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Add two numbers.\n\n    Both are int."},
    {"role": "assistant", "content": "def add(a, b):\n    return a + b"},
    {"role": "user", "content": "Now multiply."},
]


def render(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    template = ChatTemplate.find(FOLDER)
    assert template is not None
    return template.render(messages, add_generation_prompt=add_generation_prompt)


def test_turns_are_comments_and_answers_stay_code() -> None:
    text = render(MESSAGES)
    assert text == (
        "<|endoftext|>import sys\n"
        "\n\n# Be brief.\n"
        "\n\n# Add two numbers.\n#\n#     Both are int.\n"
        "\ndef add(a, b):\n    return a + b\n"
        "\n\n# Now multiply.\n"
        "\n"
    )
    ast.parse(text.removeprefix("<|endoftext|>"))


def test_a_conversation_grows_at_its_end() -> None:
    """So that what was computed for the turns before could be used again."""
    assert render(MESSAGES).startswith(render(MESSAGES[:2]) + "def add(a, b):\n    return a + b\n")


def test_the_text_begins_with_the_token_that_begins_every_file_of_the_training() -> None:
    token_ids = Tokenizer.from_path(FOLDER).encode(render(MESSAGES), add_special_tokens=False)
    assert token_ids[0] == 0 and 0 not in token_ids[1:]
