"""The errors of this package.

TierError
├── CheckpointError        a checkpoint is missing, unfinished or does not belong with the others
│   ├── ModelMismatchError      two tiers' checkpoints are not one model
│   └── TokenizerMismatchError  two tiers would read the same prompt as different tokens
├── SchemeError            a scheme, or the table of schemes, is wrong
├── PlanError              the engines do not fit on this machine
│   └── NoRoomError        its memory is too small
├── EngineError            an engine process failed
│   ├── PortInUseError          its port is taken by something else
│   ├── EngineDiedError         it exited
│   │   └── EngineHungError     it computes nothing any more
│   ├── EngineSlowError         it runs elsewhere, and has been too slow for too long
│   └── WarmupFailedError       its answers are not sane text
│       └── CanaryRefusedError  its log-probabilities or its speed are not those of its checkpoint
├── OperationError         an operator's request cannot be carried out
│   ├── UnknownReplicaError     there is no such replica
│   └── NotPossibleError        not on this replica, or not now
├── DiscoveryError         a file or a DNS name does not tell engines
├── TrustError             a file of trusted authorities cannot be used
└── ProbeError             an engine did not answer a probe as vLLM does
    ├── RefusedError       it refused the request with HTTP 400
    ├── BusyError          it has no room for the request now
    └── NoScoresError      its answers have no log-probabilities
"""

from __future__ import annotations


class TierError(Exception):
    """Base of all errors of this package. The text says what to do next."""


class CheckpointError(TierError):
    """A checkpoint is missing, unfinished or unusable."""


class SchemeError(TierError):
    """A scheme, or the table of schemes, is wrong."""


class ModelMismatchError(CheckpointError):
    """The checkpoints of tiers differ in architecture, vocabulary, tokenizer or chat template."""


class TokenizerMismatchError(CheckpointError):
    """Tiers differ in tokenizer or chat template."""


class PlanError(TierError):
    """The engines do not fit on this machine."""


class NoRoomError(PlanError):
    """It has too little memory for them."""


class EngineError(TierError):
    """An engine process failed."""


class PortInUseError(EngineError):
    """The engine's port is taken."""


class EngineDiedError(EngineError):
    """The engine process exited."""


class EngineHungError(EngineDiedError):
    """The engine has requests and computes nothing."""


class EngineSlowError(EngineError):
    """The engine, which runs elsewhere, has been too slow for too long."""


class WarmupFailedError(EngineError):
    """The engine is alive but its answers are not usable."""


class CanaryRefusedError(WarmupFailedError):
    """The engine computes something else than its checkpoint says, or is much slower."""


class OperationError(TierError):
    """An operator's request is not carried out."""


class UnknownReplicaError(OperationError):
    """There is no such replica."""


class NotPossibleError(OperationError):
    """The operation is not possible on this replica, or not now."""


class DiscoveryError(TierError):
    """A file or a DNS name does not tell which engines there are.

    Attributes:
        brief: Without addresses: others than operators may see it.
    """

    def __init__(self, brief: str, more: str = "") -> None:
        super().__init__(f"{brief}: {more}" if more else brief)
        self.brief = brief


class TrustError(TierError):
    """A file or folder of trusted authorities cannot be used. The text names the setting or the variable."""


class ProbeError(TierError):
    """The engine did not answer a probe as vLLM does."""


class RefusedError(ProbeError):
    """The engine refused the request (HTTP 400)."""


class BusyError(ProbeError):
    """The engine, or the router before it, has no room for the request now (HTTP 429 or 503)."""


class NoScoresError(ProbeError):
    """The engine's answers have no token ids or no log-probabilities."""
