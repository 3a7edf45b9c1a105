# SPDX-License-Identifier: Apache-2.0
"""The version of this distribution, alone in a module that the build reads without importing the package."""

__version__ = "0.1.0"
