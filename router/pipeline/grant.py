"""What a request that is let in holds: quota, slot and lease."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.auth import quota
    from router.pipeline.admission import Admission, Admitted


@dataclass(slots=True, eq=False)
class Grant:
    """Quota, slot and lease of one request. Release it exactly once, however the request ends.

    Attributes:
        quota: Taken in advance from the caller's; None: not yet, or the caller has no limits.
        slot: With the lease on a replica; None: not yet.
        used: Prompt and output tokens; None: the request was not served, and does not count.
    """

    _admission: Admission
    _key_id: str
    quota: quota.Grant | None = None
    slot: Admitted | None = None
    used: int | None = None

    async def release(self) -> None:
        """Give all of it back; of the quota, what was not used."""
        if self.slot is not None:
            self.slot.lease.release()  # where no attempt has done so
            self._admission.leave(self._key_id, self.slot)
        if self.quota is not None:
            await self.quota.settle(self.used)
