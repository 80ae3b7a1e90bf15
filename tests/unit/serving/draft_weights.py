"""The served draft model and its weights, in a process of its own (it builds rank groups)."""

from contextlib import contextmanager

import torch
from safetensors.torch import load_file

from tests.conftest import EXAMPLE
from tests.unit.other_process import answer
from tests.unit.targets.exposed_models import one_rank

DRAFTER = EXAMPLE / "drafter"


def examine() -> dict[str, object]:
    """Load a drafter, then replace its weights as a server does, well and badly."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    from sglang_hyperdflash.serving.drafting.model import HyperDFlashDraftModel
    from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

    model = HyperDFlashDraftModel(get_config(str(DRAFTER), trust_remote_code=False))
    tensors = load_file(DRAFTER / "model.safetensors")
    model.load_weights(tensors.items())
    contexts = []

    @contextmanager
    def replacing():
        contexts.append("before")
        yield
        contexts.append("after")

    model.replacing = replacing
    parameters = dict(model.named_parameters())
    addresses = {name: value.data_ptr() for name, value in parameters.items()}

    def values() -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in model.named_parameters()}

    def load(sent) -> None:
        try:
            model.load_weights(sent.items())
        except HyperDFlashConfigError as error:
            refusals.append(str(error))

    refusals, start = [], values()
    doubled = {name: 2 * tensor for name, tensor in tensors.items()}
    model.replace_weights(doubled)
    replaced = values()
    load({name: tensors[name] for name in sorted(tensors)[:7]})
    some = values()
    # A good tensor comes first each time: nothing may be replaced before all were checked.
    for wrong in ({"other": torch.ones(2)}, {"norm.weight": torch.ones(2)}):
        load(doubled | wrong)
    first = model.first
    return {
        "kept": first is not None,
        "own": first is not None and all(torch.equal(first[n], tensors[n]) for n in tensors),
        "doubled": all(torch.equal(replaced[n], 2 * start[n]) for n in start),
        "partly": sum(not torch.equal(some[n], replaced[n]) for n in start),
        "refusals": refusals,
        "unchanged": all(torch.equal(values()[n], some[n]) for n in start),
        "in place": {n: p.data_ptr() for n, p in model.named_parameters()} == addresses,
        "contexts": contexts,
    }


def main() -> None:
    from sglang_hyperdflash import plugin

    plugin.load()
    with one_rank(), torch.no_grad():
        answer(examine())


if __name__ == "__main__":
    main()
