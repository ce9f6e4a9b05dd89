"""What a body's ``provider`` object makes of a request's routing options."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from pydantic import ValidationError

from router.api.bodies import FieldProblem, InvalidBodyError, ProviderBody, Rules, problems_of, provider_allowed
from router.pipeline.request import RoutingOptions
from router.upstream.json_object import JsonObject
from tiers.fleet import Fleet
from tiers.quantization import quantizations_of
from tiers.spec import UNKNOWN, TierName, TierSpec


def provider_of(document: JsonObject, rules: Rules) -> ProviderBody | None:
    """Return the ``provider`` object of a body that is passed on.

    ``InvalidBodyError``: it is not valid, or asks for what cannot be honoured here.
    """
    given = document.get("provider")
    if given is None:
        return None
    try:
        return ProviderBody.model_validate(given, context=rules)
    except ValidationError as error:
        raise InvalidBodyError(problems_of(error, provider_allowed(rules.tiers), "provider")) from None


def with_provider(options: RoutingOptions, provider: ProviderBody | None, fleet: Fleet) -> RoutingOptions:
    """Return routing options with those of a ``provider`` object.

    ``InvalidBodyError``: no tier has a precision that it allows, or it contradicts the other options.
    """
    if provider is None:
        return options
    hint, field = options.hint, options.hint_field
    if provider.order is not None:
        first = TierName(provider.order[0])
        if hint not in {None, first}:
            raise _invalid("order", f"names {first}, and {field} names {hint}", "the same tier in both")
        hint, field = first, "provider.order"
    found = replace(
        options,
        hint=hint,
        hint_field=field,
        require=options.require or provider.allow_fallbacks is False,
        precisions=None if provider.quantizations is None else frozenset(provider.quantizations),
        only=_only(provider, fleet.specs),
        sort=provider.sort,
    )
    _check(found, fleet)
    return found


def _only(provider: ProviderBody, specs: Sequence[TierSpec]) -> frozenset[TierName] | None:
    if provider.only is None and not provider.ignore:
        return None
    named = [spec.name for spec in specs] if provider.only is None else provider.only
    left = frozenset(TierName(name) for name in named if name not in (provider.ignore or ()))
    if not left:
        raise _invalid("ignore", "leaves no tier", f"fewer of {', '.join(named)}")
    return left


def _check(options: RoutingOptions, fleet: Fleet) -> None:
    """Raise ``InvalidBodyError`` if no tier has a precision that is allowed, or the one that is mandatory has not.

    A tier that is not ready and whose precision is not known may turn out to have one.
    """
    allowed, hint = options.precisions, options.hint
    if allowed is None:
        return
    specs = [spec for spec in fleet.specs if not spec.absent]
    asked = [s for s in specs if options.only is None or s.name in options.only]
    if options.require and hint is not None:
        asked = [spec for spec in asked if spec.name is hint]
    if any(spec.precision == UNKNOWN and not fleet.is_ready(spec.name) for spec in asked):
        return
    if asked and not any(quantizations_of(spec.precision) <= allowed for spec in asked):
        there = "; ".join(f"{spec.name} has {' and '.join(sorted(quantizations_of(spec.precision)))}" for spec in asked)
        wrong = f"allows {', '.join(sorted(allowed))}, which no tier that may serve this has"
        raise _invalid("quantizations", wrong, there)


def _invalid(field: str, problem: str, allowed: str) -> InvalidBodyError:
    return InvalidBodyError((FieldProblem(f"provider.{field}", problem, allowed),))
