# SPDX-License-Identifier: Apache-2.0
"""The PyTorch backend: kernels, modules, models, the executor's loop, speculation."""
