# SPDX-License-Identifier: Apache-2.0
"""Storage of the caches: life cycles, quota, pools, slots, reuse, eviction, tiers."""
