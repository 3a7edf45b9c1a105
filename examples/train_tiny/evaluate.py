# SPDX-License-Identifier: Apache-2.0
"""Bits per byte of kimi-k3-tiny on the held-out standard-library files, with xz's figure beside it.

python examples/train_tiny/evaluate.py        (several minutes on one core)
"""

import lzma
import math

import torch
from corpus import held_out_files
from tokenizers import Tokenizer
from torch.nn import functional as F

from tensorrt_llm._torch.models.auto import load_model, resolve_model_folder

MODEL = "kimi-k3-tiny"
WINDOW_TOKENS = 2048


@torch.inference_mode()
def main() -> None:
    model = load_model(MODEL, torch.float32, "cpu")
    tokenizer = Tokenizer.from_file(str(resolve_model_folder(MODEL) / "tokenizer.json"))
    nats, num_bytes, corpus = 0.0, 0, []
    for source in held_out_files():
        ids = torch.tensor([0, *tokenizer.encode(source.text, add_special_tokens=False).ids])
        for start in range(0, len(ids) - 1, WINDOW_TOKENS):
            window = ids[start : start + WINDOW_TOKENS + 1]
            logits = model.training_logits(window[:-1].unsqueeze(0))[0]
            nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
        num_bytes += source.num_bytes
        corpus.append(source.text)
    packed = lzma.compress("".join(corpus).encode(), preset=9 | lzma.PRESET_EXTREME)
    bits = nats / math.log(2) / num_bytes
    xz = 8 * len(packed) / num_bytes
    print(f"{len(corpus)} files, {num_bytes} bytes: model {bits:.4f}, xz {xz:.4f} bits per byte")


if __name__ == "__main__":
    main()
