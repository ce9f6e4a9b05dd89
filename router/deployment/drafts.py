"""Drafts of speculative decoding: where their checkpoints are, and that they fit their tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from router.settings import Settings
from tiers.checkpoints.checkpoint import Checkpoint, identity
from tiers.checkpoints.hub import checkpoint_folder
from tiers.errors import CheckpointError, PlanError, TokenizerMismatchError
from tiers.plan import model_config
from tiers.spec import Draft, TierName, TierSpec


def with_drafts(
    specs: Sequence[TierSpec],
    settings: Settings,
    checkpoints_by_tier: Mapping[TierName, Checkpoint] = MappingProxyType({}),
) -> tuple[TierSpec, ...]:
    """Return the tiers with the folders of their drafts, as far as they are made.

    Raises:
        PlanError: A draft is no lower tier, or its checkpoint is not there, and is not made either.
    """
    return tuple(
        replace(
            spec,
            draft=_with_folder(
                spec, specs, settings, checkpoints_by_tier=checkpoints_by_tier
            ),
        )
        for spec in specs
    )


def _with_folder(
    spec: TierSpec,
    specs: Sequence[TierSpec],
    settings: Settings,
    *,
    checkpoints_by_tier: Mapping[TierName, Checkpoint],
) -> Draft | None:
    """Return a tier's draft with its folder, or without one if that is still to be made.

    None: the tier has no draft, or no engines here.
    """
    draft = spec.draft
    if draft is None or not spec.replicas:
        return None
    if draft.startable:
        return draft
    rising_tiers = [tier.name for tier in specs]
    if draft.source not in rising_tiers:
        return replace(draft, checkpoint=Path(draft.source))
    draft_tier = TierName(draft.source)
    if rising_tiers.index(draft_tier) >= rising_tiers.index(spec.name):
        raise PlanError(
            f"tiers.{spec.name}.draft is {draft_tier}: ngram, a tier of lower precision or a model folder is allowed"
        )
    draft_spec = specs[rising_tiers.index(draft_tier)]
    draft_settings = settings.tiers.of(draft_tier)
    folder = draft_spec.checkpoint
    if folder is None and draft_settings.checkpoint is not None:
        folder = checkpoint_folder(draft_settings.checkpoint, settings.model.store)
    if folder is None and draft_tier in checkpoints_by_tier:
        folder = checkpoints_by_tier[draft_tier].path
    if folder is None and not draft_settings.replicas_here:
        raise PlanError(
            f"tiers.{spec.name}.draft is {draft_tier}, whose checkpoint is not made: run 'qarr model prepare', let its "
            f"engines run here, or name a folder"
        )
    return replace(draft, checkpoint=folder)


def check_draft(spec: TierSpec) -> None:
    """Check that a tier's draft model reads and writes the same tokens as the tier.

    Raises:
        TokenizerMismatchError: It does not.
        CheckpointError: A folder is no model's.
    """
    if spec.checkpoint is None or spec.draft is None or spec.draft.checkpoint is None:
        return
    draft_folder = spec.draft.checkpoint
    digest = identity(spec.checkpoint).tokenizer_digest
    draft_digest = identity(draft_folder).tokenizer_digest
    try:
        vocabulary_size = model_config(spec.checkpoint).get("vocab_size")
        draft_vocabulary_size = model_config(draft_folder).get("vocab_size")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"tiers.{spec.name}.draft: {error}: a folder with a config.json is needed"
        ) from error
    if digest != draft_digest or vocabulary_size != draft_vocabulary_size:
        raise TokenizerMismatchError(
            f"tiers.{spec.name}.draft has another vocabulary: {spec.name} ({spec.checkpoint}) has {vocabulary_size} "
            f"tokens, digest {digest}; the draft ({draft_folder}) has {draft_vocabulary_size}, digest {draft_digest}. A "
            f"draft must share the tier's tokenizer: name a lower tier, or a folder with the same tokenizer.json"
        )
