# SPDX-License-Identifier: Apache-2.0
"""Reading and writing checkpoints: Hugging Face tensor names over the model's fused parameters.

`checkpoint_tensors()` of each block says which view every name loads into, so that loading, saving and the
check of the key set are one mechanism.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tensorrt_llm._torch.models.modeling_kimi import KimiForCausalLM
from tensorrt_llm.logger import logger

_PREFIXES = ("language_model.",)
_IGNORED = ("vision_tower.", "mm_projector.")
_SHOWN_NAMES = 10


def _tensor_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors: give a folder with the checkpoint's weights")
    return files


def _model_name(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _first(names: Iterable[str]) -> str:
    shown = sorted(names)
    more = len(shown) - _SHOWN_NAMES
    return ", ".join(shown[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def _copy(name: str, target: Tensor, source: Tensor) -> None:
    """Fill the view; A_log may be longer with a zero tail, or shaped [1, 1, H, 1]: its elements count."""
    if name.endswith(".A_log"):
        source = source.flatten()
        if source[target.numel() :].any():
            raise ValueError(f"{name}: elements beyond head {target.numel()} are padding and must be zero")
        source = source[: target.numel()]
    if source.shape != target.shape:
        raise ValueError(
            f"{name} has shape {tuple(source.shape)}, but config.json asks for {tuple(target.shape)}"
        )
    target.copy_(source)


@torch.no_grad()
def load_weights(model: KimiForCausalLM, folder: Path) -> None:
    """Fill the model's parameters from the folder's safetensors files, whatever dtype they are stored in.

    The key set is checked both ways before any data is read: missing names are a ValueError, extra ones a
    warning.
    """
    targets = model.checkpoint_tensors()
    files = _tensor_files(folder)
    found: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            found |= {_model_name(key): path for key in file.keys()}  # noqa: SIM118 (not a mapping)
    missing = targets.keys() - found.keys()
    if missing:
        raise ValueError(f"{folder}: {len(missing)} tensors are missing: {_first(missing)}")
    extra = [n for n in found if n not in targets and not n.startswith(_IGNORED)]
    if extra:
        logger.warning(f"{folder}: {len(extra)} tensors are not used: {_first(extra)}")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                if _model_name(key) in targets:
                    _copy(key, targets[_model_name(key)], file.get_tensor(key))


def save_weights(model: KimiForCausalLM, path: Path, dtype: torch.dtype, pad_heads_to: int = 1) -> None:
    """Write the checkpoint as one file: matrices as `dtype`, A_log (padded with zeros), dt_bias and the
    router's bias as fp32."""
    tensors = {}
    for name, tensor in model.checkpoint_tensors().items():
        tensor = tensor.detach().cpu()
        if name.endswith(".A_log"):
            tensor = torch.nn.functional.pad(tensor, (0, -tensor.numel() % pad_heads_to))
        keep = name.endswith((".A_log", ".dt_bias", "e_score_correction_bias"))
        tensors[name] = tensor.to(torch.float32 if keep else dtype).contiguous().clone()
    save_file(tensors, path)
