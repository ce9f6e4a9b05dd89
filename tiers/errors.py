"""What can go wrong in the fleet.

TierError
├── CheckpointError        a checkpoint is missing, unfinished or does not belong with the others
│   └── TokenizerMismatch  two tiers would read the same prompt as different tokens
├── PlanError              the engines cannot fit on this machine
├── EngineError            an engine process
│   ├── PortInUse          its port is taken by something else
│   ├── EngineDied         it exited
│   └── WarmupFailed       it answers, but not with sane text, or not in time
│       └── CanaryRefused  it answers otherwise than its checkpoint did before
├── OperationError         what an operator asked for
│   ├── UnknownReplica     there is no such replica
│   └── NotPossible        it cannot be done to this replica now
└── ProbeError             an engine did not answer a probe as vLLM does
    └── RefusedError       it answered 400: it does not take such a request
"""

from __future__ import annotations


class TierError(Exception):
    """Base of every error of this package. The text says what to do next."""


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


class WarmupFailed(EngineError):
    """The engine is alive but its answers are not usable."""


class CanaryRefused(WarmupFailed):
    """The engine answers otherwise, or much slower, than its checkpoint did before."""


class OperationError(TierError):
    """What an operator asked for is not done."""


class UnknownReplica(OperationError):
    """There is no such replica."""


class NotPossible(OperationError):
    """It cannot be done to this replica, or not now."""


class ProbeError(TierError):
    """A probe was not answered as vLLM answers it."""


class RefusedError(ProbeError):
    """The engine does not take such a request (HTTP 400)."""
