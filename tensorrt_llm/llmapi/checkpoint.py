# SPDX-License-Identifier: Apache-2.0
"""Where a model's files are, and what they say about its tokens."""

import json
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"


def packaged_models() -> dict[str, Path]:
    """The models that ship with the package, by name."""
    assets = Path(__file__).resolve().parents[1] / "assets"
    return {path.parent.name: path.parent for path in sorted(assets.glob(f"*/{CONFIG_FILE}"))}


def find_checkpoint(model: str | Path) -> Path:
    """The folder of a packaged model or of a checkpoint on disk. Raises ValueError naming what there is."""
    folder = Path(model)
    if (folder / CONFIG_FILE).is_file():
        return folder
    packaged = packaged_models()
    if str(model) in packaged:
        return packaged[str(model)]
    reason = f"the folder has no {CONFIG_FILE}" if folder.is_dir() else "there is no such folder"
    offered = ", ".join(packaged) or "none"
    raise ValueError(
        f"model={str(model)!r}: {reason}, and it is no packaged model (these are: {offered}); models are not "
        "downloaded, so give a checkpoint folder"
    )


def read_end_ids(checkpoint: Path) -> tuple[int, ...]:
    """The tokens that end a text: `eos_token_id` of the generation config, else of the (text) config."""
    config = _read_json(checkpoint / CONFIG_FILE)
    for source in (_read_json(checkpoint / GENERATION_CONFIG_FILE), config, config.get("text_config", {})):
        found = source.get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; it must be an object")
    return content
