# SPDX-License-Identifier: Apache-2.0
"""The base of every class that a user's input fills: unknown names are refused, errors name the full path."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

Arguments = ParamSpec("Arguments")
Model = TypeVar("Model", bound=BaseModel)

_UNKNOWN = "unknown_name"


class StrictBaseModel(BaseModel):
    """A frozen model without tolerance: an unknown name is an error that gives the nearest valid one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    not_offered: ClassVar[frozenset[str]] = frozenset()
    """Names that TensorRT-LLM or OpenAI know and this project does not offer."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_names(cls, data: object) -> object:
        if isinstance(data, Mapping):
            for name in data:
                if name not in cls.model_fields:
                    raise _unknown_name(str(name), list(cls.model_fields), cls.not_offered)
        return data


def explain_unknown_keywords(
    not_offered: frozenset[str],
) -> Callable[[Callable[Arguments, None]], Callable[Arguments, None]]:
    """Decorate a constructor so that its TypeError for an unknown keyword gives the nearest valid name."""

    def decorate(constructor: Callable[Arguments, None]) -> Callable[Arguments, None]:
        valid = [name for name in inspect.signature(constructor).parameters if name != "self"]

        @functools.wraps(constructor)
        def checked(*args: Arguments.args, **keywords: Arguments.kwargs) -> None:
            for name in keywords:
                if name not in valid:
                    raise TypeError(_unknown_name(name, valid, not_offered).message())
            constructor(*args, **keywords)

        return checked

    return decorate


def _unknown_name(name: str, valid: list[str], not_offered: frozenset[str]) -> PydanticCustomError:
    nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0)
    context = {"name": name, "nearest": nearest[0] if nearest else ""}
    if name in not_offered:
        return PydanticCustomError(_UNKNOWN, "'{name}' is not offered here", context)
    return PydanticCustomError(
        _UNKNOWN, "there is no '{name}'; the nearest valid name is '{nearest}'", context
    )


def parse(model: type[Model], data: Mapping[str, Any]) -> Model:
    """`model(**data)`; raises ValueError with one readable line per fault instead of pydantic's report."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ValueError("; ".join(describe_errors(error))) from None


def describe_errors(error: ValidationError) -> list[str]:
    """One line per fault: the full dotted path, what is wrong, and the value."""
    return [describe_error(detail) for detail in error.errors(include_url=False)]


def error_path(detail: ErrorDetails) -> str:
    """The dotted path of a fault, list positions in brackets: `kv_cache_config.pool_ratio[1]`."""
    # Tags of discriminated unions stand in pydantic's path but not in the user's input.
    parts = [part for part in detail["loc"] if not (isinstance(part, str) and part[:1].isupper())]
    if detail["type"] == _UNKNOWN:
        parts.append(detail["ctx"]["name"])
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def describe_error(detail: ErrorDetails) -> str:
    """One fault: its path, what is wrong, and the value."""
    path = error_path(detail)
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] in (_UNKNOWN, "missing", "value_error"):
        return f"{path}: {message}" if path else message
    return f"{path}: {message} (it is {_shorten(detail['input'])})"


def _shorten(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
