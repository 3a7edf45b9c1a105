# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's `logger`, behind which stands Python's `logging`.

Records go to the logging tree under the name `tensorrt_llm`. An application that has set logging up receives
them there; where nobody has, they are written to stderr.
"""

import logging
import sys
from collections.abc import Hashable
from typing import TextIO, get_args

from tensorrt_llm import envs

_PYTHON_LEVEL: dict[str, int] = {
    "trace": 5,
    "debug": logging.DEBUG,
    "verbose": 15,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "internal_error": logging.CRITICAL,
}


class _StderrWhereNobodyListens(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is now, and only while the root logger has no handler of its own."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("[%(asctime)s] [TRT-LLM] [%(levelname).1s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)


class Logger:
    """Writes messages made of parts joined by a space, as `print` does.

    The `_once` forms write a message the first time its key is seen in this process; the key is the message
    itself unless given.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._seen: set[tuple[str, Hashable]] = set()
        self._level: envs.LogLevel = "info"
        if not any(isinstance(handler, _StderrWhereNobodyListens) for handler in self._logger.handlers):
            self._logger.addHandler(_StderrWhereNobodyListens())
        self.set_level(envs.log_level())

    @property
    def level(self) -> envs.LogLevel:
        return self._level

    def set_level(self, level: envs.LogLevel) -> None:
        """Drop messages less severe than `level`. Raises ValueError for a name that is not a level."""
        if level not in _PYTHON_LEVEL:
            raise ValueError(
                f"log level is {level!r}; it must be one of {', '.join(get_args(envs.LogLevel))}"
            )
        self._level = level
        self._logger.setLevel(_PYTHON_LEVEL[level])

    def error(self, *parts: object) -> None:
        self._write("error", parts)

    def warning(self, *parts: object) -> None:
        self._write("warning", parts)

    def info(self, *parts: object) -> None:
        self._write("info", parts)

    def debug(self, *parts: object) -> None:
        self._write("debug", parts)

    def warning_once(self, *parts: object, key: Hashable = None) -> None:
        self._write_once("warning", parts, key)

    def info_once(self, *parts: object, key: Hashable = None) -> None:
        self._write_once("info", parts, key)

    def debug_once(self, *parts: object, key: Hashable = None) -> None:
        self._write_once("debug", parts, key)

    def _write(self, level: envs.LogLevel, parts: tuple[object, ...]) -> None:
        # The record's place in the code is the caller's of the public method, two frames up.
        number = _PYTHON_LEVEL[level]
        if self._logger.isEnabledFor(number):
            self._logger.log(number, "%s", " ".join(map(str, parts)), stacklevel=3)

    def _write_once(self, level: envs.LogLevel, parts: tuple[object, ...], key: Hashable) -> None:
        message = " ".join(map(str, parts))
        seen = (level, message if key is None else key)
        if seen not in self._seen:
            self._seen.add(seen)
            self._logger.log(_PYTHON_LEVEL[level], "%s", message, stacklevel=3)


logger = Logger("tensorrt_llm")
