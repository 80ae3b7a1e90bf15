"""Seam: ``import_model_classes`` reads ``EntryClass`` of every module of the package."""

from __future__ import annotations

from cpu_engine.portable.deepseek_v4 import PortableDeepSeekV4ForCausalLM
from sglang_hyperdflash.serving.drafting.model import HyperDFlashDraftModel

EntryClass = [HyperDFlashDraftModel, PortableDeepSeekV4ForCausalLM]
