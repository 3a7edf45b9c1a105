# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.kda`."""

import sys

from benchmarks.kda.command import main

if __name__ == "__main__":
    sys.exit(main())
