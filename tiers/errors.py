"""The errors of this package.

TierError
├── CheckpointError        a checkpoint is missing, unfinished or does not belong with the others
│   └── TokenizerMismatch  two tiers would read the same prompt as different tokens
├── PlanError              the engines do not fit on this machine
├── EngineError            an engine process failed
│   ├── PortInUse          its port is taken by something else
│   ├── EngineDied         it exited
│   │   └── EngineHung     it computes nothing any more
│   ├── EngineSlow         it runs elsewhere, and has been too slow for too long
│   └── WarmupFailed       its answers are not sane text
│       └── CanaryRefused  its answers or its speed are not those of its checkpoint before
├── OperationError         an operator's request cannot be carried out
│   ├── UnknownReplica     there is no such replica
│   └── NotPossible        not on this replica, or not now
├── DiscoveryError         a file or a DNS name does not tell engines
└── ProbeError             an engine did not answer a probe as vLLM does
    └── RefusedError       it refused the request with HTTP 400
"""

from __future__ import annotations


class TierError(Exception):
    """Base of all errors of this package. The text says what to do next."""


class CheckpointError(TierError):
    """A checkpoint is missing, unfinished or unusable."""


class TokenizerMismatch(CheckpointError):
    """Tiers differ in tokenizer or chat template."""


class PlanError(TierError):
    """The engines do not fit on this machine."""


class EngineError(TierError):
    """An engine process failed."""


class PortInUse(EngineError):
    """The engine's port is taken."""


class EngineDied(EngineError):
    """The engine process exited."""


class EngineHung(EngineDied):
    """The engine has requests and computes nothing."""


class EngineSlow(EngineError):
    """The engine, which runs elsewhere, has been too slow for too long."""


class WarmupFailed(EngineError):
    """The engine is alive but its answers are not usable."""


class CanaryRefused(WarmupFailed):
    """The engine's answers differ from its checkpoint's earlier ones, or it is much slower."""


class OperationError(TierError):
    """An operator's request is not carried out."""


class UnknownReplica(OperationError):
    """There is no such replica."""


class NotPossible(OperationError):
    """The operation is not possible on this replica, or not now."""


class DiscoveryError(TierError):
    """A file or a DNS name does not tell which engines there are.

    Attributes:
        brief: Without addresses: others than operators may see it.
    """

    def __init__(self, brief: str, more: str = "") -> None:
        super().__init__(f"{brief}: {more}" if more else brief)
        self.brief = brief


class ProbeError(TierError):
    """The engine did not answer a probe as vLLM does."""


class RefusedError(ProbeError):
    """The engine refused the request (HTTP 400)."""
