# SPDX-License-Identifier: Apache-2.0
"""How one request fails."""

from tensorrt_llm._torch.pyexecutor.llm_request import FailureKind, RequestFailure


class RequestError(RuntimeError):
    """The engine could not finish this request; others go on unless `kind` is FATAL or SHUTDOWN."""

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.message)
        self.kind: FailureKind = failure.kind
