# SPDX-License-Identifier: Apache-2.0
"""What runs below the models: the storage of the caches."""
