"""What can go wrong between the router and an engine.

UpstreamError
├── EngineUnreachableError   no connection, or no first token in time     tried elsewhere
├── EngineFailedError        an answer of 5xx, or one that makes no sense  tried elsewhere
├── EngineRefusedError       the request itself is at fault               not tried elsewhere
├── EngineTooSlowError       no whole answer in time                      not tried elsewhere
├── EngineBrokeError         failed after the first token                 continued elsewhere, else told to the caller
│   ├── EngineStalledError   by silence
│   └── SeamError            what resumed the answer began it differently  told to the caller
├── NoSlotError              every slot was taken since the decision
└── NoEngineAnsweredError    every attempt failed
"""

from __future__ import annotations

from typing import TypeVar


class UpstreamError(Exception):
    """Base of what can go wrong between the router and an engine."""


class EngineUnreachableError(UpstreamError):
    """No connection, or no first token in time."""


class _AskAgainError(UpstreamError):
    """An error after which engines can be asked again, in ``retry_after_s`` at the soonest; None: one does not say when."""

    def __init__(self, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class EngineFailedError(_AskAgainError):
    """The engine, or a proxy in front of it, answered with an error of its own.

    Args:
        detail: What is wrong, without any of the prompt's text.
        retry_after_s: When it can be asked again, in seconds; None: it does not say.
        is_requests_fault_possible: The engine works, and an error within it has ended the request: others may end it in
            the same way.
    """

    def __init__(
        self,
        detail: str,
        retry_after_s: float | None = None,
        *,
        is_requests_fault_possible: bool = False,
    ) -> None:
        super().__init__(detail, retry_after_s)
        self.is_requests_fault_possible = is_requests_fault_possible


class EngineRefusedError(UpstreamError):
    """The engine says that the request is wrong.

    Args:
        detail: The engine's words. They may quote the prompt.
        status: The HTTP status.
        body: The engine's whole answer.
        kind: The engine's type of error, and the field that it names, as far as these are plain names.
    """

    def __init__(
        self, detail: str, status: int = 400, body: bytes = b"", *, kind: str = ""
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status
        self.body = body
        self.kind = kind

    @property
    def without_words(self) -> str:
        """Return what of it may be logged."""
        kind_text = f", {self.kind}" if self.kind else ""
        return f"the engine refused it: HTTP {self.status}{kind_text}"


class EngineTooSlowError(UpstreamError):
    """The engine did not finish an answer that is not streamed in time."""


class EngineBrokeError(UpstreamError):
    """The engine failed after the first token."""


class EngineStalledError(EngineBrokeError):
    """The engine sent no further token in time."""


class SeamError(EngineBrokeError):
    """An engine that resumed an answer began it in another way than its caller has it."""


class NoSlotError(UpstreamError):
    """Every slot was taken between the decision and the attempt."""


class NoEngineAnsweredError(_AskAgainError):
    """Every attempt failed before the first token."""


Fault = TypeVar("Fault", bound=BaseException)


def without_trace(error: Fault) -> Fault:
    """Return an error that is kept, without its trace and those of its causes.

    A trace refers to the frame that keeps the error. This reference cycle would hold all of the frame's objects until the
    garbage collector runs.
    """
    cause: BaseException | None = error
    while cause is not None and cause.__traceback__ is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error
