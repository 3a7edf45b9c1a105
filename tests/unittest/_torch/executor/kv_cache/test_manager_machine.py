# SPDX-License-Identifier: Apache-2.0
"""10,000 random steps against literal requests; `machine.py` runs a million of them."""

import pytest
import torch

from tests.unittest._torch.executor.kv_cache.machine import SCHEMES, MachineOptions, run

STEPS_PER_RUN = 500
VARIANTS = [
    MachineOptions(
        scheme=scheme,
        host_acceptance=host_acceptance,
        reuse=reuse,
        host_tier=host_tier,
        conv_dtype=torch.float32 if host_tier else torch.bfloat16,
    )
    for scheme in SCHEMES
    for host_acceptance in (True, False)
    for reuse in ((False,) if scheme == "records" else (False, True))
    for host_tier in (True, False)
]


@pytest.mark.parametrize("seed", range(len(VARIANTS)))
def test_manager_equals_literal_requests(seed: int) -> None:
    done = run(seed, STEPS_PER_RUN, VARIANTS[seed])
    assert all(
        done[action] > 5 for action in ("admit", "run_batch", "suspend", "resume", "relocate", "abort")
    )


def test_ten_thousand_steps_are_run() -> None:
    assert len(VARIANTS) * STEPS_PER_RUN == 10_000


@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(len(SCHEMES)))
def test_manager_equals_literal_requests_on_a_gpu(seed: int) -> None:
    run(seed, 150, MachineOptions(scheme=SCHEMES[seed], host_acceptance=seed % 2 == 0, device="cuda"))
