# SPDX-License-Identifier: Apache-2.0
"""What fits before a GPU is bought: the cache of a model on one rank, sized by the allocator's own code."""
