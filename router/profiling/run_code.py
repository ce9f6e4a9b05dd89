"""Placeholder until the merge."""


async def passes(answer: str, test: str) -> bool:
    """Run."""
    raise NotImplementedError(answer, test)
