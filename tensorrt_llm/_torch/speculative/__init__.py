# SPDX-License-Identifier: Apache-2.0
"""Drafting and acceptance."""
