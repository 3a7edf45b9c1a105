# SPDX-License-Identifier: Apache-2.0
import pytest

from tensorrt_llm._torch.pyexecutor.config import (
    ExecutorConfig,
    ResolvedVerifyScheme,
    VerifySchemeRequest,
    limit_to_model,
    read_verify_scheme_kwargs,
    resolve_verify_scheme,
    with_resolved_scheme,
)


def resolve(
    scheme: str = "auto",
    states: bool | None = None,
    *,
    speculating: bool = True,
    reuse: bool | None = None,
    op: bool = True,
) -> ResolvedVerifyScheme:
    named, records = read_verify_scheme_kwargs({"kda_verify_scheme": scheme, "kda_token_states": states})
    return resolve_verify_scheme(
        VerifySchemeRequest(
            kda_verify_scheme=named,
            kda_token_states=records,
            speculating=speculating,
            enable_block_reuse=reuse,
            op_serves_shape=op,
        )
    )


@pytest.mark.parametrize(
    ("resolved", "scheme"),
    [
        (resolve(), "records"),
        (resolve(reuse=False), "records"),
        (resolve(op=False), "replay"),
        (resolve(speculating=False), "replay"),
        (resolve(states=True), "records"),
        (resolve("records"), "records"),
        (resolve("records", True), "records"),
        (resolve(states=False), "replay"),
        (resolve("replay", False), "replay"),
        (resolve("replay"), "replay"),
        (resolve("intermediate"), "intermediate"),
        (resolve("intermediate", False), "intermediate"),
        (resolve("replay", reuse=True), "replay"),
        (resolve("records", speculating=False, reuse=True, op=False), "records"),
    ],
)
def test_scheme(resolved: ResolvedVerifyScheme, scheme: str) -> None:
    assert resolved.scheme == scheme
    assert resolved.kda_token_states == (scheme == "records")
    assert resolved.notice is None


@pytest.mark.parametrize(("user", "resolved"), [(None, False), (False, False), (True, True)])
def test_block_reuse_is_off_unless_the_user_set_it(user: bool | None, resolved: bool) -> None:
    assert resolve("replay", reuse=user).enable_block_reuse is resolved


def test_reuse_with_auto_replays_and_says_so() -> None:
    resolved = resolve(reuse=True)
    assert resolved.scheme == "replay"
    assert resolved.notice is not None
    assert "enable_block_reuse" in resolved.notice


@pytest.mark.parametrize(
    ("scheme", "states", "reuse", "op", "message"),
    [
        ("replay", True, None, True, "kda_token_states=True contradicts kda_verify_scheme='replay'"),
        ("intermediate", True, None, True, "contradicts kda_verify_scheme='intermediate'"),
        ("records", False, None, True, "kda_token_states=False contradicts"),
        ("records", None, True, True, "enable_block_reuse=True cannot be combined with draft records"),
        ("auto", True, True, True, "enable_block_reuse=True cannot be combined with draft records"),
        ("auto", True, None, False, "no op on this device serves"),
    ],
)
def test_contradictions_are_refused(
    scheme: str, states: bool | None, reuse: bool | None, op: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(scheme, states, reuse=reuse, op=op)


@pytest.mark.parametrize(
    "kwargs", [{"kda_verify_scheme": "fast"}, {"kda_verify_scheme": None}, {"kda_token_states": "yes"}]
)
def test_values_that_are_no_choice_are_refused(kwargs: dict[str, object]) -> None:
    name = next(iter(kwargs))
    with pytest.raises(ValueError, match=f"{name} is .*it must be"):
        read_verify_scheme_kwargs(kwargs)


def test_the_model_is_told_the_resolved_scheme() -> None:
    kwargs = with_resolved_scheme({"num_hidden_layers": 4, "kda_verify_scheme": "auto"}, resolve())
    assert kwargs == {
        "num_hidden_layers": 4,
        "kda_verify_scheme": "records",
        "kda_token_states": True,
    }


def test_max_seq_len_is_the_models_unless_given() -> None:
    config = ExecutorConfig(model="m")
    assert limit_to_model(config, 4096).max_seq_len == 4096
    assert limit_to_model(ExecutorConfig(model="m", max_seq_len=100), 4096).max_seq_len == 100
    with pytest.raises(ValueError, match="max_seq_len is 5000; the model allows 2 to 4096"):
        limit_to_model(ExecutorConfig(model="m", max_seq_len=5000), 4096)
