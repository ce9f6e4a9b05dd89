"""Where the drafts of speculative decoding come from, and whether they fit their tiers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from tiers.checkpoints.checkpoint import identity
from tiers.errors import CheckpointError, PlanError, TokenizerMismatch
from tiers.plan import model_config
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.settings import Settings
    from tiers.checkpoints.checkpoint import Checkpoint
    from tiers.spec import TierSpec


def with_drafts(
    specs: Sequence[TierSpec], settings: Settings, prepared: Mapping[TierName, Checkpoint] = MappingProxyType({})
) -> tuple[TierSpec, ...]:
    """Return the tiers with the folders of their drafts, as far as they are made.

    Raises:
        PlanError: A draft is no lower tier, or its checkpoint is not there, and is not made either.
    """
    here = {spec.name: spec for spec in specs}
    rising = list(here)
    found = []
    for spec in specs:
        draft = spec.draft
        if draft is None or draft.startable or not spec.replicas:
            found.append(replace(spec, draft=draft if spec.replicas else None))
            continue
        if draft.source not in here:
            found.append(replace(spec, draft=replace(draft, checkpoint=Path(draft.source))))
            continue
        tier = TierName(draft.source)
        if rising.index(tier) >= rising.index(spec.name):
            raise PlanError(
                f"tiers.{spec.name}.draft is {tier}: ngram, a tier of lower precision or a model folder is allowed"
            )
        made = prepared[tier].path if tier in prepared else None
        own = settings.tiers.of(tier)
        folder = (here[tier].checkpoint if tier in here else None) or own.checkpoint or made
        if folder is None and not own.replicas_here:
            raise PlanError(
                f"tiers.{spec.name}.draft is {tier}, whose checkpoint is not made: run 'qarr model prepare', let its "
                f"engines run here, or name a folder"
            )
        found.append(replace(spec, draft=replace(draft, checkpoint=folder)))
    return tuple(found)


def check_draft(spec: TierSpec) -> None:
    """Check that a tier's draft model reads and writes the same tokens as the tier.

    Raises:
        TokenizerMismatch: It does not; both digests are named.
        CheckpointError: A folder is no model folder.
    """
    draft = None if spec.draft is None else spec.draft.checkpoint
    if draft is None or spec.checkpoint is None:
        return
    own, its = identity(spec.checkpoint).tokenizer_digest, identity(draft).tokenizer_digest
    try:
        size, its_size = (model_config(folder).get("vocab_size") for folder in (spec.checkpoint, draft))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"tiers.{spec.name}.draft: {error}: a folder with a config.json is needed") from error
    if own != its or size != its_size:
        raise TokenizerMismatch(
            f"tiers.{spec.name}.draft has another vocabulary: {spec.name} ({spec.checkpoint}) has {size} tokens, digest "
            f"{own}; the draft ({draft}) has {its_size}, digest {its}. A draft must share the tier's tokenizer: name a "
            f"lower tier, or a folder with the same tokenizer.json"
        )
