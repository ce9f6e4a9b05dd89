"""Issuers of tokens, and what they publish."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from tests.waiting import within

ISSUER = "https://issuer.example"


AUDIENCE = "qarr"


MAKERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "RS256": (
        lambda: rsa.generate_private_key(65537, 2048),
        jwt.algorithms.RSAAlgorithm,
    ),
    "ES256": (
        lambda: ec.generate_private_key(ec.SECP256R1()),
        jwt.algorithms.ECAlgorithm,
    ),
    "EdDSA": (ed25519.Ed25519PrivateKey.generate, jwt.algorithms.OKPAlgorithm),
}


class Issuer:
    """Signs tokens, and publishes its keys over HTTP.

    Attributes:
        answers: While this event is cleared, the issuer hangs.
        status: The status of its answers.
        fetches: How often its keys were fetched.
    """

    def __init__(self, algorithm: str = "EdDSA") -> None:
        self.algorithm = algorithm
        self.status = 200
        self.fetches = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.rotate("first")
        self.app = Starlette(routes=[Route("/jwks", self._published)])

    def rotate(self, kid: str) -> None:
        make, self._kind = MAKERS[self.algorithm]
        self.kid = kid
        self.key = make()

    @property
    def jwks(self) -> str:
        public = self._kind.to_jwk(self.key.public_key(), as_dict=True)
        return json.dumps(
            {
                "keys": [
                    {**public, "kid": self.kid},
                    {"kty": "oct", "kid": "secret", "k": "c2VjcmV0"},
                ]
            }
        )

    def sign(self, **claims: Any) -> str:
        """Return a token with usual claims; a claim that is None is left out."""
        usual = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": "alice",
            "exp": time.time() + 300,
        }
        signed = {
            name: value
            for name, value in {**usual, **claims}.items()
            if value is not None
        }
        return jwt.encode(
            signed, self.key, algorithm=self.algorithm, headers={"kid": self.kid}
        )

    async def _published(self, _request: Any) -> Response:
        self.fetches += 1
        await within(self.answers.wait(), "the test to let it answer")
        return Response(self.jwks, self.status, media_type="application/json")
