# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tensorrt_llm import logger
from tensorrt_llm._torch.models.checkpoint import save_weights
from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
from tensorrt_llm._torch.pyexecutor.kv_cache.config import KvCacheSettings
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.legacy import MixedMambaHybridCacheManager
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.pyexecutor.py_executor_creator import (
    create_py_executor,
    resolve_config_scheme,
    resolve_device,
    resolve_dtype,
)
from tensorrt_llm._torch.speculative.interface import SpeculationSpec
from tests.unittest._torch.executor.fakes import Collected
from tests.unittest._torch.executor.tiny_kimi import TINY_CONFIG, make_tiny_rig, tiny_model, tiny_request

NGRAM = SpeculationSpec(decoding_type="NGram", max_draft_len=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny model."""
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(TINY_CONFIG))
    save_weights(tiny_model(), path / "model.safetensors", torch.float32)
    return path


def config_for(folder: Path, **changes: object) -> ExecutorConfig:
    base = ExecutorConfig(
        model=str(folder), device="cpu", max_batch_size=2, max_num_tokens=256, max_seq_len=300
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def run_one(executor: PyExecutor) -> list[int]:
    answer = Collected()
    executor.submit(tiny_request(0, 40, 60), answer.responses.append)
    while executor.run_step():
        pass
    executor.shutdown()
    return answer.token_ids


@pytest.mark.parametrize("spec", [None, NGRAM], ids=["plain", "ngram"])
def test_a_checkpoint_folder_becomes_an_executor(folder: Path, spec: SpeculationSpec | None) -> None:
    rig = make_tiny_rig()
    rig.submit(tiny_request(0, 40, 60))
    assert run_one(create_py_executor(config_for(folder, speculation=spec))) == rig.run()[0]


def test_the_description_has_the_sizes(folder: Path) -> None:
    executor = create_py_executor(config_for(folder, speculation=NGRAM))
    about = executor.description
    executor.shutdown()
    assert (about.max_batch_size, about.max_num_tokens, about.max_seq_len) == (2, 256, 300)
    assert (about.verify_scheme, about.max_draft_len, about.vocab_size) == ("records", 3, 50)
    # Three KDA layers, records [3, drafts, heads, width] and conv columns [channels, W - 1 + drafts], all
    # fp32.
    assert about.records_bytes == about.ssm_slots * 3 * (3 * 3 * 2 * 16) * 4
    assert about.other_side_bytes >= about.ssm_slots * 3 * (3 * 32 * 6) * 4
    assert about.ssm_slots >= 3
    assert about.attention_pages * about.tokens_per_page >= 600
    for part in (f"{about.attention_pages} attention pages of 64", "state slots", "undone by records"):
        assert part in about.cache_line()


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({}, None),
        ({"speculation": NGRAM, "enable_block_reuse": True}, "replay"),
        ({"speculation": NGRAM, "model_kwargs": {"kda_verify_scheme": "intermediate"}}, "intermediate"),
        ({"speculation": NGRAM, "model_kwargs": {"kda_token_states": False}}, "replay"),
    ],
)
def test_the_scheme_in_force(folder: Path, changes: dict[str, object], scheme: str | None) -> None:
    executor = create_py_executor(config_for(folder, **changes))
    about = executor.description
    executor.shutdown()
    assert about.verify_scheme == scheme
    assert (about.records_bytes > 0) == (scheme == "records")


def test_a_contradiction_is_found_before_the_model_is_looked_for() -> None:
    config = ExecutorConfig(
        model="/nowhere",
        model_kwargs={"kda_token_states": True},
        enable_block_reuse=True,
        speculation=NGRAM,
    )
    with pytest.raises(ValueError, match="enable_block_reuse=True cannot be combined"):
        create_py_executor(config)


def test_reuse_with_auto_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What this process has logged once already is forgotten for this test.
    monkeypatch.setattr(logger, "_seen", set())
    config = ExecutorConfig(model="m", enable_block_reuse=True, speculation=NGRAM)
    with caplog.at_level("INFO"):
        resolve_config_scheme(config)
        resolve_config_scheme(config)
    assert len([r for r in caplog.records if "undone by replay" in r.message]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "kimi-nonsense"}, "kimi-nonsense"),
        ({"max_seq_len": 10_000}, "max_seq_len is 10000; the model allows 2 to 4096"),
        ({"max_num_tokens": 64}, "max_num_tokens is 64; it must be >= 65"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_what_cannot_work_is_refused(folder: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_py_executor(config_for(folder, **changes))


def test_dtype_and_device() -> None:
    assert resolve_dtype("auto", torch.device("cpu")) is torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert resolve_dtype("float16", torch.device("cpu")) is torch.float16
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="finds no GPU here"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("given", "tokens"), [(KvCacheSettings(), 600), (KvCacheSettings(max_tokens=310), 310)]
)
def test_the_cache_holds_all_requests_at_full_length_unless_told(
    folder: Path, given: KvCacheSettings, tokens: int
) -> None:
    executor = create_py_executor(config_for(folder, kv_cache_config=given))
    about = executor.description
    executor.shutdown()
    held = about.attention_pages * about.tokens_per_page
    # Pools come in grains of 2 MiB, and max_util_for_resume adds its share.
    assert tokens <= held <= tokens / 0.95 + (2 << 20) / (2 * 24 * 4)


def test_a_cache_too_small_for_its_states_is_refused(folder: Path) -> None:
    small = KvCacheSettings(max_gpu_total_bytes=1000)
    with pytest.raises(ValueError, match="1000"):
        create_py_executor(config_for(folder, kv_cache_config=small))


MIXED = KvCacheSettings(use_kv_cache_manager_v2=False)


@pytest.mark.parametrize(("asked", "resolved"), [("auto", "records"), ("intermediate", "intermediate")])
def test_a_manager_that_undoes_drafts_otherwise_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: str, resolved: str
) -> None:
    shut_down: list[object] = []
    shutdown = MixedMambaHybridCacheManager.shutdown

    def note_shutdown(self: MixedMambaHybridCacheManager) -> None:
        shut_down.append(self)
        shutdown(self)

    monkeypatch.setattr(MixedMambaHybridCacheManager, "shutdown", note_shutdown)
    config = config_for(
        folder,
        speculation=NGRAM,
        model_kwargs={"kda_verify_scheme": asked},
        kv_cache_config=MIXED,
    )
    both = f"kda_verify_scheme is '{resolved}', but the cache manager is MixedMamba.* by replay: set"
    with pytest.raises(ValueError, match=both):
        create_py_executor(config)
    assert len(shut_down) == 1


@pytest.mark.parametrize("spec", [None, NGRAM], ids=["plain", "ngram"])
def test_the_mixed_manager_serves_what_it_has(folder: Path, spec: SpeculationSpec | None) -> None:
    config = config_for(
        folder,
        speculation=spec,
        model_kwargs={} if spec is None else {"kda_verify_scheme": "replay"},
        kv_cache_config=MIXED,
    )
    assert run_one(create_py_executor(config)) == run_one(create_py_executor(config_for(folder)))
