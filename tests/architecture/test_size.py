# SPDX-License-Identifier: Apache-2.0
"""The size budget counts what it says and finds what is too large."""

from pathlib import Path

import pytest

from tools import size
from tools.size import Budget, Exemption, Module

BUDGET = Budget(
    module_lines=10, kernel_module_lines=20, test_module_lines=15, function_lines=4, median_function_lines=4
)
LONG_BODY = "    a = 1\n" * 6


def measure(text: str, path: str = "tensorrt_llm/mapping.py") -> Module:
    return size.measure(path, text)


def excesses(*modules: Module, exemptions: tuple[Exemption, ...] = ()) -> list[str]:
    # The median is a matter of its own below.
    budget = Budget(
        module_lines=10,
        kernel_module_lines=20,
        test_module_lines=15,
        function_lines=4,
        median_function_lines=100,
        exemptions=exemptions,
    )
    return size.find_excesses(modules, budget)


@pytest.mark.parametrize(
    ("path", "text", "limit"),
    [
        ("tensorrt_llm/a.py", "a = 1\n", 10),
        ("tensorrt_llm/a.py", "import triton\n", 20),
        ("tensorrt_llm/a.py", "def f():\n    from cutlass import cute\n", 20),
        ("tests/test_a.py", "import triton\n", 15),
    ],
)
def test_module_has_the_limit_of_its_kind(path: str, text: str, limit: int) -> None:
    at_limit = text + "\n" * (limit - text.count("\n"))
    assert excesses(measure(at_limit, path)) == []
    assert len(excesses(measure(at_limit + "\n", path))) == 1


def test_function_is_counted_with_its_class_and_without_its_docstring() -> None:
    (function,) = measure(
        'class A:\n    def f(self):\n        """One.\n\n        Two.\n        """\n        return 1\n'
    ).functions
    assert (function.name, function.lines) == ("A.f", 2)


def test_long_function_is_found_unless_a_compiler_takes_it() -> None:
    assert excesses(measure(f"def f():\n{LONG_BODY}")) == [
        "tensorrt_llm/mapping.py: f has 7 lines, 4 are allowed; split it"
    ]
    assert excesses(measure(f"@triton.jit\ndef f():\n{LONG_BODY}")) == []
    assert excesses(measure(f"@triton.autotune(configs=[])\ndef f():\n{LONG_BODY}")) == []


@pytest.mark.parametrize(("lines", "found"), [(6, 1), (7, 0), (8, 1)])
def test_exception_fits_exactly(lines: int, found: int) -> None:
    exemption = Exemption(path="tensorrt_llm/mapping.py", function="f", lines=lines, reason="a table")
    assert len(excesses(measure(f"def f():\n{LONG_BODY}"), exemptions=(exemption,))) == found


def test_exception_that_nothing_needs_is_found() -> None:
    exemption = Exemption(path="tensorrt_llm/gone.py", function=None, lines=600, reason="history")
    assert len(excesses(exemptions=(exemption,))) == 1


def test_median_counts_the_package_alone() -> None:
    long = "def f():\n    a = 1\n    b = 2\n    return a + b\n"
    assert len(size.find_excesses([measure(long)], BUDGET)) == 1
    assert size.find_excesses([measure(long, "tests/test_a.py")], BUDGET) == []


def test_exception_without_a_reason_is_refused(tmp_path: Path) -> None:
    text = (size.ROOT / "tools" / "budget.toml").read_text()
    planted = tmp_path / "budget.toml"
    planted.write_text(text + '\n[[exception]]\npath = "a.py"\nlines = 600\nreason = " "\n')
    with pytest.raises(ValueError, match=r"exception for a\.py has an empty reason"):
        size.read_budget(planted)
