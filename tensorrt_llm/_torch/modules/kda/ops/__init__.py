# SPDX-License-Identifier: Apache-2.0
"""The kernels of Kimi delta attention, each beside its reference."""
