# SPDX-License-Identifier: Apache-2.0
"""The loop: requests, scheduler, model engine, sampler."""
