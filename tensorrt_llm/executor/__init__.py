# SPDX-License-Identifier: Apache-2.0
"""Carries requests to the loop and results back."""
