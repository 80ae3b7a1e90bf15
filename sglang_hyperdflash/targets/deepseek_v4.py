"""The seams that let HYPERDFLASH start on SGLang's own DeepSeek-V4.

SGLang 0.5.23 admits only EAGLE and DSPARK on V4 (only DSPARK on V4.1) and budgets a draft as one
more V4 layer. Other algorithms are not affected.
"""

from __future__ import annotations

from sglang_hyperdflash import ALGORITHM, is_ours
from sglang_hyperdflash.seams import after, around
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def resolve_early(server_args, previous) -> None:
    """Normalise the algorithm's name and set top-k to 1 before anything reads them.

    Seam: ``register_resolution_hook("handle_missing_default_values")``. The default attention
    backend of the target depends on top-k and is chosen before the algorithm resolves its fields.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    previous(server_args)
    resolved = resolving_view(server_args)
    if not is_ours(resolved.speculative_algorithm):
        return
    declare_resolution(server_args, "hyperdflash", speculative_algorithm=ALGORITHM)
    if resolved.speculative_eagle_topk is None:
        declare_resolution(server_args, "hyperdflash", speculative_eagle_topk=1)


def resolve_as(original, name: str | None, server_args, *rest):
    """Call a step that supports SGLang's own algorithms only, with ``name`` as the algorithm."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    if not is_ours(resolving_view(server_args).speculative_algorithm):
        return original(server_args, *rest)
    declare_resolution(server_args, "hyperdflash", speculative_algorithm=name)
    try:
        return original(server_args, *rest)
    finally:
        declare_resolution(server_args, "hyperdflash", speculative_algorithm=ALGORITHM)


@around("sglang.srt.arg_groups.deepseek_v4_hook:apply_deepseek_v4_defaults", "1e53b5d11a08")
def pass_admission(original, server_args, model_arch):
    """Apply V4's defaults as DSPARK: their last lines admit only EAGLE and DSPARK by name."""
    return resolve_as(original, "DSPARK", server_args, model_arch)


@around("sglang.srt.arg_groups.deepseek_v4_hook:validate_deepseek_v41_features", "454d8318f6c9")
def pass_admission_v41(original, server_args):
    """Validate V4.1 without the algorithm: SGLang admits only DSPARK.

    Raises:
        HyperDFlashConfigError: prefix replay is on for V4.1.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    resolved = resolving_view(server_args)
    v41 = model_config_of(server_args).hf_config.model_type == "deepseek_v41"
    replays = v41 and resolved.enable_encoder_swa_bounded_replay
    if replays and is_ours(resolved.speculative_algorithm):
        raise HyperDFlashConfigError(
            f"{ALGORITHM} does not support enable_encoder_swa_bounded_replay on DeepSeek-V4.1: "
            "prefill rows that a replay computed never reach the drafter; drop the flag."
        )
    return resolve_as(original, None, server_args)


@after("sglang.srt.model_executor.pool_configurator:DSV4PoolConfigurator.__init__", "bfa7e9dd41c2")
def budget_draft_kv(result, self, kvc, *args, **kwargs):
    """Budget the drafter's real K/V bytes per full token instead of one more V4 layer.

    SGLang inflates the coefficients by (layers + 1) / layers for any speculative algorithm; dense
    draft K/V take several times that.

    Raises:
        HyperDFlashConfigError: SGLang could not determine the size of the draft's K/V.
    """
    from sglang.srt.model_executor import pool_configurator

    if kvc.is_draft_worker or not is_ours(kvc.spec_algorithm):
        return
    cell = pool_configurator._dflash_draft_cell_size(kvc)
    if cell <= 0:
        raise HyperDFlashConfigError(
            "the draft's K/V bytes per token are unknown, so its pool would not be budgeted: "
            "SGLang's message above says why. Check the draft's config.json."
        )
    self._spec_infl = 1.0
    self.bytes_per_swa_token = self._get_bytes_per_swa_token()
    self.bytes_per_full_token = self._get_bytes_per_full_token() + cell
