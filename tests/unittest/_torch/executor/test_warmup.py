# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from tensorrt_llm._torch.pyexecutor.model_engine import ModelEngine
from tensorrt_llm._torch.pyexecutor.warmup import full_step_lengths, run_full_step
from tests.unittest._torch.executor.fakes import FakeCache, FakeModel


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [((100, 8, 400), [100]), ((100, 8, 41), [40, 40, 20]), ((100, 2, 41), [40, 40]), ((80, 8, 41), [40, 40])],
)
def test_few_prompts_fill_a_step(limits: tuple[int, int, int], lengths: list[int]) -> None:
    assert full_step_lengths(*limits) == lengths


@pytest.mark.parametrize(("num_pages", "num_slots", "fitting"), [(50, 8, 3), (50, 2, 2), (7, 8, 1)])
def test_the_step_runs_what_fits_and_gives_it_back(num_pages: int, num_slots: int, fitting: int) -> None:
    cache, model = FakeCache(num_pages, num_slots), FakeModel()
    engine = ModelEngine(model, cache, attention_layer=0, device=torch.device("cpu"))
    assert run_full_step(engine, cache, [40, 40, 20]) == fitting
    assert model.num_forwards == 1
    cache.check_empty()
