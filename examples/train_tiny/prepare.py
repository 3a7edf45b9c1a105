# SPDX-License-Identifier: Apache-2.0
"""Train the byte-level BPE on the training files and write the token streams that `train.py` reads.

python examples/train_tiny/prepare.py --out DIR        (a few minutes on two cores)
"""

import argparse
import json
import lzma
from pathlib import Path

import numpy as np
from corpus import SourceFile, describe, held_out_files, training_files
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 1536
END_OF_TEXT = "<|endoftext|>"
# A line break takes the next line's indentation with it; words take one leading space; digits stand alone.
PIECES = r"\n[ ]*| ?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|\s+"
_TOKENIZER_BYTES = 30_000_000


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of 1,536 tokens, id 0 the end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, files: list[SourceFile]) -> np.ndarray:
    """The files' tokens one after the other, uint16, an end-of-text token before each."""
    encodings = tokenizer.encode_batch_fast([f.text for f in files], add_special_tokens=False)
    parts = [np.array([0, *encoding.ids], dtype=np.uint16) for encoding in encodings]
    return np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    library, packages = training_files()
    held_out = held_out_files()
    shuffled = np.random.default_rng(0).permutation(len(packages))
    sample = [f.text for f in library]
    budget = _TOKENIZER_BYTES
    for i in shuffled:
        budget -= packages[i].num_bytes
        if budget > 0:
            sample.append(packages[i].text)
    tokenizer = train_tokenizer(sample)
    tokenizer.save(str(out / "tokenizer.json"))
    streams = {
        "library": token_stream(tokenizer, library),
        "packages": token_stream(tokenizer, packages),
        "held_out": token_stream(tokenizer, held_out),
    }
    np.savez_compressed(out / "tokens.npz", **streams)
    text = "".join(f.text for f in held_out).encode()
    xz = len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    record = describe() | {
        "held_out_files": [f.name for f in held_out],
        "held_out_bytes": len(text),
        "xz_bits_per_byte": 8 * xz / len(text),
        "bytes": {
            name: sum(f.num_bytes for f in files)
            for name, files in (("library", library), ("packages", packages))
        },
        "tokens": {name: len(stream) for name, stream in streams.items()},
    }
    (out / "corpus.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: record[k] for k in ("held_out_bytes", "xz_bits_per_byte", "bytes", "tokens")}))


if __name__ == "__main__":
    main()
