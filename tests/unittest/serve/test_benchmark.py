# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of `benchmarks/serve_cpu.py`; its figures are no matter for tests."""

import ast

import pytest

from benchmarks.serve_cpu import Answer, held_out_prompts, mean_ratio, median_rate, structured_prompt


def answer(seconds: float, num_tokens: int = 10) -> Answer:
    return Answer(
        text="", num_tokens=num_tokens, seconds=seconds, num_drafted_rounds=2, num_drafts=6, num_accepted=3
    )


def test_rates_and_ratios() -> None:
    slow, fast = [answer(2.0), answer(4.0), answer(1.0)], [answer(1.0), answer(1.0), answer(2.0)]
    assert median_rate(slow) == 5.0
    assert mean_ratio(fast, slow) == pytest.approx((2 * 4 * 0.5) ** (1 / 3))
    assert mean_ratio(slow, slow) == 1.0


def test_held_out_prompts_are_drawn_by_seed() -> None:
    prompts = held_out_prompts(20, seed=3)
    assert prompts == held_out_prompts(20, seed=3) != held_out_prompts(20, seed=4)
    assert len(set(prompts)) == 20 and all(prompt.endswith("\n") for prompt in prompts)


def test_structured_prompt_is_a_class_of_ten_methods_and_the_start_of_one_more() -> None:
    (record,) = ast.parse(structured_prompt() + "end(self): pass").body
    assert isinstance(record, ast.ClassDef)
    assert sum(isinstance(part, ast.FunctionDef) for part in record.body) == 11
