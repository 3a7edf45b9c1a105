# SPDX-License-Identifier: Apache-2.0
"""Runtime parts that stand below the PyTorch backend."""
