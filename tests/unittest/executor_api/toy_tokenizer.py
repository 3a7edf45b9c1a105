# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer with a handful of merges, so that tests know every id."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from tensorrt_llm.llmapi.tokenizer import Tokenizer

EOS_TEXT = "<eos>"
MARK_TEXT = "<|mark|>"
MERGES = [("d", "e"), ("de", "f"), ("r", "e"), ("Ġ", "x"), ("S", "T"), ("O", "P"), ("#", "#")]


def toy_backend() -> HfTokenizer:
    """256 bytes, MERGES, then the special token <eos> and the ordinary added token <|mark|>."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    backend = HfTokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(EOS_TEXT, special=True), AddedToken(MARK_TEXT, special=False)])
    return backend


def toy_tokenizer() -> Tokenizer:
    return Tokenizer(toy_backend())


def eos_id(tokenizer: Tokenizer) -> int:
    (token_id,) = tokenizer.encode(EOS_TEXT)
    return token_id
