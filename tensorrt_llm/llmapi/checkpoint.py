# SPDX-License-Identifier: Apache-2.0
"""What the files beside a checkpoint's weights say about its texts."""

import json
from pathlib import Path

from tensorrt_llm._torch.models.config import load_config

GENERATION_CONFIG_FILE = "generation_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"


def read_end_ids(checkpoint: Path) -> tuple[int, ...]:
    """The tokens that end a text: `eos_token_id` of the generation config, else of the config."""
    file = checkpoint / GENERATION_CONFIG_FILE
    if file.is_file():
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{file} is no JSON object: {error}") from None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return load_config(checkpoint).eos_token_ids
