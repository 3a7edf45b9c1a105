# SPDX-License-Identifier: Apache-2.0
"""Three kinds of failure, told apart by class.

* The caller's mistake: `MisuseError` (a ValueError), raised before anything is changed.
* Lack of capacity: `OutOfMemoryError` and its subclasses, which a scheduler handles.
* Our bug: `LogicError` (an AssertionError), whose message carries the numbers.
`CuError` reports a failed CUDA driver call.
"""


class MisuseError(ValueError):
    """The caller broke the contract of a call; the message names the argument, its value and the remedy."""


class ResourceBusyError(MisuseError):
    """The call needs something that is still in use, such as a shutdown while a cache is open."""


class OutOfMemoryError(Exception):
    """A memory tier cannot give what was asked for; nothing was changed."""


class OutOfPagesError(OutOfMemoryError):
    """A pool group has fewer available slots than requested."""


class HostOOMError(OutOfMemoryError):
    """The operating system refused host memory for a pool."""


class DiskOOMError(OutOfMemoryError):
    """The file system refused space for a pool."""


class CuOOMError(OutOfMemoryError):
    """The CUDA driver refused device memory for a pool."""


class LogicError(AssertionError):
    """An invariant of the cache core does not hold: a bug in this package."""


class CuError(RuntimeError):
    """A CUDA driver call failed for a reason other than lack of memory."""
