# SPDX-License-Identifier: Apache-2.0
"""The packaged model on prompts it was not trained on: with drafts it writes what it writes without, byte
for byte.

`make test` takes 12 prompts; `make test-slow` takes 100 and prints the mean number of tokens per round.
"""

from functools import cache
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from examples.train_tiny.corpus import held_out_files
from tensorrt_llm._torch.models.auto import resolve_model_folder
from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig, VerifySchemeName
from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorRequest
from tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor
from tensorrt_llm._torch.pyexecutor.stats import EngineSnapshot
from tensorrt_llm._torch.speculative.interface import SpeculationSpec
from tests.unittest._torch.executor.fakes import Collected

MODEL = "kimi-k3-tiny"
SEED = 2026
SCHEMES: tuple[VerifySchemeName, ...] = ("records", "replay", "intermediate")
DRAFT_LENGTHS = (1, 3, 5, 7)


@cache
def held_out_prompts(count: int) -> list[tuple[int, ...]]:
    """Pieces of 40 to 160 tokens, drawn by seed from held-out files of the running Python."""
    tokenizer = Tokenizer.from_file(str(Path(resolve_model_folder(MODEL)) / "tokenizer.json"))
    random, sources, prompts = Random(SEED), held_out_files(), list[tuple[int, ...]]()
    while len(prompts) < count:
        ids = tokenizer.encode(random.choice(sources).text).ids
        length = random.randint(40, 160)
        if len(ids) > length:
            start = random.randrange(len(ids) - length)
            prompts.append(tuple(ids[start : start + length]))
    return prompts


def write(
    prompts: list[tuple[int, ...]],
    max_tokens: int,
    batch: int,
    scheme: VerifySchemeName = "records",
    max_draft_len: int = 0,
) -> tuple[list[list[int]], EngineSnapshot]:
    """The prompts' greedy continuations, `batch` at a time."""
    spec = SpeculationSpec(decoding_type="NGram", max_draft_len=max_draft_len) if max_draft_len else None
    executor = create_py_executor(
        ExecutorConfig(
            model=MODEL,
            device="cpu",
            model_kwargs={"kda_verify_scheme": scheme},
            max_batch_size=batch,
            max_num_tokens=256,
            max_seq_len=512,
            enable_chunked_prefill=True,
            speculation=spec,
        )
    )
    answers = [Collected() for _ in prompts]
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        request = ExecutorRequest(request_id=i, prompt_token_ids=prompt, max_tokens=max_tokens)
        executor.submit(request, answer.responses.append)
    while executor.run_step():
        pass
    snapshot = executor.snapshot()
    executor.shutdown()
    return [answer.token_ids for answer in answers], snapshot


@cache
def plain_texts(count: int, max_tokens: int) -> list[list[int]]:
    return write(held_out_prompts(count), max_tokens, batch=1)[0]


@pytest.mark.parametrize("max_draft_len", DRAFT_LENGTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_twelve_prompts(scheme: VerifySchemeName, max_draft_len: int) -> None:
    batch = 2 + (3 * SCHEMES.index(scheme) + DRAFT_LENGTHS.index(max_draft_len)) % 7
    texts, snapshot = write(held_out_prompts(12), 32, batch, scheme, max_draft_len)
    assert texts == plain_texts(12, 32)
    assert snapshot.accepted_tokens_total > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("max_draft_len", DRAFT_LENGTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_hundred_prompts(
    scheme: VerifySchemeName, max_draft_len: int, batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, snapshot = write(held_out_prompts(100), 64, batch, scheme, max_draft_len)
    assert texts == plain_texts(100, 64)
    rounds = snapshot.generation_tokens_total - snapshot.accepted_tokens_total - 100
    accepted = snapshot.accepted_tokens_total / rounds
    with capsys.disabled():
        print(f"{scheme}, K {max_draft_len}, batch {batch}: {accepted:.2f} drafts accepted per round")
