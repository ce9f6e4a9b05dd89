"""Why the server takes no request."""

from __future__ import annotations


class BodyTooLargeError(Exception):
    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes")
        self.limit = limit


class TextTooLargeError(BodyTooLargeError):
    """A body is larger than it may be without images."""

    def __init__(self, limit: int) -> None:
        Exception.__init__(
            self,
            f"the request body is larger than {limit} bytes besides images and other long data in base64",
        )
        self.limit = limit


class TooManyBodiesError(Exception):
    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the large bodies of all requests have more than {limit} bytes together: try again later"
        )


class HeadTooLargeError(Exception):
    def __init__(self, max_bytes: int, max_headers: int) -> None:
        super().__init__(
            f"path and headers are more than {max_bytes} bytes, or more than {max_headers} headers"
        )


class RequestTooSlowError(Exception):
    def __init__(self, part: str, limit_s: float) -> None:
        super().__init__(
            f"the request's {part} was not complete after {limit_s:g} s: send it again, faster"
        )


class TooManyConnectionsError(Exception):
    """More connections than the router takes."""


class NotHttpError(Exception):
    """Bytes that are no request."""
