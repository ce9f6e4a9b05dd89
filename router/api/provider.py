"""What a body's ``provider`` object makes of a request's routing options."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from pydantic import ValidationError

from router.api.bodies import (
    FieldProblem,
    InvalidBodyError,
    ProviderBody,
    Rules,
    problems_of,
    provider_allowed,
)
from router.pipeline.request import RoutingOptions
from router.upstream.json_object import JsonObject
from tiers.fleet import Fleet
from tiers.formats import quantizations_of
from tiers.spec import UNKNOWN, TierName, TierSpec


def provider_of(document: JsonObject, rules: Rules) -> ProviderBody | None:
    """Return the ``provider`` object of a body that is passed on.

    ``InvalidBodyError``: it is not valid, or asks for what cannot be honoured here.
    """
    provider = document.get("provider")
    if provider is None:
        return None
    try:
        return ProviderBody.model_validate(provider, context=rules)
    except ValidationError as error:
        raise InvalidBodyError(
            problems_of(error, provider_allowed(rules.tiers), "provider")
        ) from None


def with_provider(
    options: RoutingOptions, provider: ProviderBody | None, fleet: Fleet
) -> RoutingOptions:
    """Return routing options with those of a ``provider`` object.

    ``InvalidBodyError``: no tier has a precision that it allows, or it contradicts the other options.
    """
    if provider is None:
        return options
    hint = options.hint
    hint_field = options.hint_field
    if provider.order is not None:
        first_tier = TierName(provider.order[0])
        if hint not in {None, first_tier}:
            raise _invalid(
                "order",
                f"names {first_tier}, and {hint_field} names {hint}",
                "the same tier in both",
            )
        hint = first_tier
        hint_field = "provider.order"
    precisions = None
    if provider.quantizations is not None:
        precisions = frozenset(provider.quantizations)
    combined = replace(
        options,
        hint=hint,
        hint_field=hint_field,
        require=options.require or provider.allow_fallbacks is False,
        precisions=precisions,
        only=_only(provider, fleet.specs),
        sort=provider.sort,
    )
    _check_precisions(combined, fleet)
    return combined


def _only(
    provider: ProviderBody, specs: Sequence[TierSpec]
) -> frozenset[TierName] | None:
    """Return the tiers that may serve a request; None: all. ``InvalidBodyError``: none is left."""
    ignored = provider.ignore or []
    if provider.only is None and not ignored:
        return None
    named_tiers = provider.only
    if named_tiers is None:
        named_tiers = [spec.name for spec in specs]
    remaining = frozenset(TierName(name) for name in named_tiers if name not in ignored)
    if not remaining:
        raise _invalid("ignore", "leaves no tier", f"fewer of {', '.join(named_tiers)}")
    return remaining


def _check_precisions(options: RoutingOptions, fleet: Fleet) -> None:
    """Raise ``InvalidBodyError`` if no tier that may serve a request has a precision that the request allows.

    A tier that is not ready and whose precision is not known may turn out to have one.
    """
    allowed = options.precisions
    if allowed is None:
        return
    specs = [
        spec
        for spec in fleet.specs
        if not spec.absent and _may_serve(spec.name, options)
    ]
    if any(
        spec.precision == UNKNOWN and not fleet.is_ready(spec.name) for spec in specs
    ):
        return
    if not specs or any(quantizations_of(spec.precision) <= allowed for spec in specs):
        return
    raise _invalid(
        "quantizations",
        problem=f"allows {', '.join(sorted(allowed))}, which no tier that may serve this has",
        allowed="; ".join(
            f"{spec.name} has {_quantizations_text(spec)}" for spec in specs
        ),
    )


def _may_serve(tier: TierName, options: RoutingOptions) -> bool:
    if options.require and options.hint is not None and tier is not options.hint:
        return False
    return options.only is None or tier in options.only


def _quantizations_text(spec: TierSpec) -> str:
    return " and ".join(sorted(quantizations_of(spec.precision)))


def _invalid(field: str, problem: str, allowed: str) -> InvalidBodyError:
    return InvalidBodyError((FieldProblem(f"provider.{field}", problem, allowed),))
