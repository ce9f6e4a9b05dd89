"""Run coroutines at the same time. The first error cancels the others and is raised itself, not a group of errors."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

T = TypeVar("T")
S = TypeVar("S")


async def run_both(
    first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, S]
) -> tuple[T, S]:
    """Run two coroutines at once and return both results."""
    try:
        async with asyncio.TaskGroup() as group:
            first_task = group.create_task(first)
            second_task = group.create_task(second)
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return first_task.result(), second_task.result()


async def run_all(works: Iterable[Coroutine[Any, Any, T]]) -> tuple[T, ...]:
    """Run coroutines at once and return their results in order."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return tuple(task.result() for task in tasks)


def first_error(errors: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of a group of errors and groups."""
    first = errors.exceptions[0]
    if isinstance(first, ExceptionGroup):
        return first_error(first)
    return first
