# SPDX-License-Identifier: Apache-2.0
"""Building blocks of the models."""
