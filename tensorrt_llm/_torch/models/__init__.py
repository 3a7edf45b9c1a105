# SPDX-License-Identifier: Apache-2.0
"""The models, built from `_torch.modules`."""
