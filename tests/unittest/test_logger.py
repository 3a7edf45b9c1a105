# SPDX-License-Identifier: Apache-2.0
import logging

import pytest

from tensorrt_llm.logger import Logger


@pytest.fixture
def logger(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Logger:
    monkeypatch.delenv("TLLM_LOG_LEVEL", raising=False)
    return Logger(f"test_logger.{request.node.name}")


def test_parts_are_joined_and_levels_kept(logger: Logger, caplog: pytest.LogCaptureFixture) -> None:
    logger.error("slot", 3)
    logger.warning("50%", "full")
    logger.info("fine")
    logger.debug("unseen")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", "slot 3"),
        ("WARNING", "50% full"),
        ("INFO", "fine"),
    ]


def test_record_points_at_the_caller(logger: Logger, caplog: pytest.LogCaptureFixture) -> None:
    logger.info("here")
    logger.info_once("here")
    assert [record.funcName for record in caplog.records] == ["test_record_points_at_the_caller"] * 2


def test_level_is_set(logger: Logger, caplog: pytest.LogCaptureFixture) -> None:
    logger.set_level("error")
    logger.warning("unseen")
    assert (logger.level, caplog.messages) == ("error", [])
    logger.set_level("trace")
    logger.debug("seen")
    assert caplog.messages == ["seen"]


def test_unknown_level_is_refused(logger: Logger) -> None:
    with pytest.raises(ValueError, match="log level is 'loud'; it must be one of trace, debug"):
        logger.set_level("loud")  # type: ignore[arg-type]


def test_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_LOG_LEVEL", "error")
    assert Logger("test_logger.environment").level == "error"


def test_once_is_once_for_a_message_or_a_key(logger: Logger, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(3):
        logger.info_once("same")
        logger.info_once("step", step)
        logger.warning_once("waiting since", step, key="waiting")
    assert caplog.messages == ["same", "step 0", "waiting since 0", "step 1", "step 2"]


def test_unlistened_records_go_to_stderr(
    logger: Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logger.info("alone")
    assert capsys.readouterr().err.endswith("[TRT-LLM] [I] alone\n")


def test_listened_records_are_not_written_twice(logger: Logger, capsys: pytest.CaptureFixture[str]) -> None:
    # pytest's own handlers listen at the root here.
    logger.info("heard")
    assert "heard" not in capsys.readouterr().err
