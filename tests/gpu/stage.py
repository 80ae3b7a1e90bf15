"""Where a visit takes place: V4 with real widths on a GPU, or the small V4 of a CPU test.

Both are SGLang's own class with weights drawn at random, an untrained drafter whose blocks differ,
and an oracle between the two (``tests/engine/v4/drafts.py``).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_hyperdflash.training.drafter import DrafterShape
from tests.engine.drafters import write_untrained
from tests.engine.v4 import checkpoint, plugin, serve
from tests.unit.serving.v4_shapes import FLASH, target_folder

SHAPE = FLASH | {"num_hidden_layers": 6, "n_routed_experts": 16}
SHAPE["compress_ratios"] = [*FLASH["compress_ratios"][:6], 0]
ARGUMENTS = ("--load-format", "dummy", "--skip-tokenizer-init", "--log-level", "info")
# Its weights are bf16: SGLang resolves an MoE backend for quantized ones.
ARGUMENTS += ("--moe-runner-backend", "triton")
# SGLang's dummy weights are of one size everywhere, norms too: every logit would be a tie.
WEIGHTS = """
import zlib
import torch

def draw(model, *args, **kwargs):
    for name, value in model.state_dict().items():
        if not torch.is_floating_point(value):
            continue
        if value.dim() < 2:
            value.fill_(1.0 if "norm" in name else 0.0 if "base" in name else 0.5)
            continue
        generator = torch.Generator(device=value.device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(value.shape, generator=generator, device=value.device)
        value.copy_(drawn * value.shape[-1] ** -0.5)

def load():
    from sglang.srt.model_loader import loader
    loader.initialize_dummy_weights = draw
    from tests.engine.v4 import controls, drafts
    controls.install()
    drafts.install_if_asked()
"""


@dataclass(frozen=True)
class Stage:
    """Sizes of a visit, and how its servers start."""

    shape: dict  # the target's ``config.json``
    environment: dict[str, str]  # of every server's plugin
    write_target: Callable[[Path], Path]
    draft: DrafterShape
    mask_token: int = 128815
    context: int = 16_384
    requests: int = 16  # at once
    most: tuple[int, int] = (1 << 20, 256)  # context and requests of the largest server
    long_prompt: int = 200_000
    window: int = 128  # of the windowed drafter, so small that an answer slides it
    tokens: int = 160  # of an answer
    first: int = 300  # tokens of the shortest prompt
    boundary: int = 300  # with an answer, so many tokens pass a multiple of 128
    arguments: tuple[str, ...] = ARGUMENTS
    source: str = WEIGHTS
    gpu: bool = True  # whether kernels, graphs and traces are there

    @property
    def sizes(self) -> tuple[str, ...]:
        """A server's context and requests, as arguments; on a GPU the batches that are captured."""
        most = str(self.requests)
        captured = ("--cuda-graph-max-bs-decode", most) if self.gpu else ()
        return "--context-length", str(self.context), "--max-running-requests", most, *captured

    def largest(self) -> "Stage":
        """The stage whose servers have the longest context and the most requests."""
        return replace(self, context=self.most[0], requests=self.most[1])

    def write_drafter(self, folder: Path, window: int | None = None) -> Path:
        shape = replace(self.draft, window=window)
        return write_untrained(folder, self.shape, shape, self.mask_token)

    def prompts(self, count: int, seed: int = 0, first: int | None = None) -> list[list[int]]:
        """Random prompts, all of different lengths, the shortest of ``first`` tokens."""
        draw, most = random.Random(seed), int(self.shape["vocab_size"]) - 50
        first = first or self.first
        return [[draw.randrange(5, most) for _ in range(first + 3 * i)] for i in range(count)]


GPU = Stage(
    SHAPE,
    {},
    lambda folder: target_folder(folder, SHAPE),
    DrafterShape(layers=5, heads=32, kv_heads=8, head_dim=128, intermediate_size=8192),
)
CPU = Stage(
    checkpoint.CONFIG,
    dict(plugin.ENVIRONMENT),
    checkpoint.write_target,
    DrafterShape(**checkpoint.DRAFT),
    mask_token=checkpoint.MASK_TOKEN,
    context=4096,
    requests=4,
    most=(4096, 4),
    long_prompt=300,
    window=16,
    tokens=32,
    first=20,
    boundary=115,
    arguments=(*serve.ARGUMENTS, *serve.POOL),
    source=serve.PLUGIN,
    gpu=False,
)
