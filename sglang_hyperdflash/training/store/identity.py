"""Whose states a server of a target gives, read from the target's files."""

from __future__ import annotations

from sglang_hyperdflash.draft.hc_head import tensors_fingerprint
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles
from sglang_hyperdflash.targets.final_state import FinalState
from sglang_hyperdflash.training.store.manifest import Identity


def identity_of(files: TargetFiles, dtype: str, *, fp8: bool = False) -> Identity:
    """Whose states a server of the target gives.

    Args:
        fp8: whether they are stored in fp8.

    Raises:
        HyperDFlashConfigError: no drafter can be trained from the residual alone.
    """
    facts = TargetFacts.from_config(files.config())
    final, gate = FinalState.of(files), files.hc_head(facts.hc_mult, facts.hidden_size)
    return Identity(
        target_architecture=facts.architecture,
        hc_head_fingerprint=None if gate is None else gate.fingerprint(),
        norm_fingerprint=tensors_fingerprint(final.norm),
        hc_mult=facts.hc_mult,
        hidden_size=facts.hidden_size,
        dtype=dtype,
        fp8=fp8,
    )
