"""The checks of ``qarr doctor``, in the order in which they are made and shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from router.cli.doctor.file_checks import (
    check_checkpoints,
    check_engine_environment,
    check_keys,
)
from router.cli.doctor.findings import CheckContext, Finding
from router.cli.doctor.machine_checks import check_disk, check_gpus, check_kernels
from router.cli.doctor.network_checks import check_engine_ports, check_router_port
from router.cli.doctor.running_checks import check_router
from router.cli.doctor.tier_checks import check_tiers


class DoctorCheck(NamedTuple):
    """A check, and what its findings are called."""

    group: str
    name: str
    make: Callable[[CheckContext], Iterable[Finding]]


CHECKS = (
    DoctorCheck("settings", "tiers", make=check_tiers),
    DoctorCheck("machine", "GPU", make=check_gpus),
    DoctorCheck("machine", "kernels", make=check_kernels),
    DoctorCheck("machine", "disk", make=check_disk),
    DoctorCheck("files", "keys", make=check_keys),
    DoctorCheck("files", "engine environment", make=check_engine_environment),
    DoctorCheck("files", "checkpoints", make=check_checkpoints),
    DoctorCheck("network", "router port", make=check_router_port),
    DoctorCheck("network", "engine ports", make=check_engine_ports),
    DoctorCheck("running", "router", make=check_router),
)
