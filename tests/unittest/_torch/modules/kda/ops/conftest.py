# SPDX-License-Identifier: Apache-2.0
"""Without a GPU, Triton kernels run in its interpreter, which has to be known before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
