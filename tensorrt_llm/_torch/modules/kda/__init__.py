# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention: recurrence, chunked form, and the ways to undo rejected drafts."""
