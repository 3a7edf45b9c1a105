# SPDX-License-Identifier: Apache-2.0
"""Checks of this repository on itself, run by `make check`."""
