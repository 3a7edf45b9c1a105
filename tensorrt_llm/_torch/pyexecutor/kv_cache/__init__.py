# SPDX-License-Identifier: Apache-2.0
"""The managers that give requests their pages, slots and records."""
