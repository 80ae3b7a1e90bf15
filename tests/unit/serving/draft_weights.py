"""The served draft model and its weights, in a process of its own (it builds rank groups)."""

from contextlib import nullcontext
from copy import deepcopy

import torch
from safetensors.torch import load_file

from tests.conftest import EXAMPLE
from tests.unit.other_process import answer
from tests.unit.targets.exposed_models import one_rank

DRAFTER = EXAMPLE / "drafter"


def examine() -> dict[str, object]:
    """Load a drafter, then replace its weights as a server does: all of them, then some."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    from sglang_hyperdflash.serving.drafting.model import HyperDFlashDraftModel

    model = HyperDFlashDraftModel(get_config(str(DRAFTER), trust_remote_code=False))
    tensors = load_file(DRAFTER / "model.safetensors")
    model.load_weights(tensors.items())
    model.replacing, parameters = nullcontext, dict(model.named_parameters())
    start, before = deepcopy(parameters), [value.data_ptr() for value in model.parameters()]
    model.replace_weights({name: 2 * tensor for name, tensor in tensors.items()})
    replaced = deepcopy(parameters)
    model.load_weights([(name, tensors[name]) for name in sorted(tensors)[:7]])
    return {
        "doubled": all(torch.equal(replaced[n], 2 * start[n]) for n in start),
        "partly": sum(not torch.equal(parameters[n], replaced[n]) for n in start),
        "in place": [value.data_ptr() for value in model.parameters()] == before,
    }


def main() -> None:
    from sglang_hyperdflash import plugin

    plugin.load()
    with one_rank(), torch.no_grad():
        answer(examine())


if __name__ == "__main__":
    main()
