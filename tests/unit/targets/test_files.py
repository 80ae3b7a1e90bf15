"""What a target's files say of it."""

from __future__ import annotations

import pytest

from sglang_hyperdflash.targets.files import DTYPE_NAMES, model_dtype
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


@pytest.mark.parametrize(
    "config, dtype",
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "half"}, "float16"),
        ({"torch_dtype": "float32"}, "float16"),
        ({"dtype": "float8_e4m3fn"}, "float16"),
        ({}, "float16"),
        ({"torch_dtype": "float32", "model_type": "gemma3"}, "bfloat16"),
    ],
)
def test_the_automatic_data_type_is_sglang_s(config, dtype):
    from sglang.srt.configs.model_config import _get_and_verify_dtype

    assert model_dtype("auto", config) == dtype
    assert str(_get_and_verify_dtype(config, "auto")) == f"torch.{dtype}"


def test_the_names_of_data_types_are_sglang_s():
    from sglang.srt.configs.model_config import _STR_DTYPE_TO_TORCH_DTYPE

    expected = {name: str(dtype) for name, dtype in _STR_DTYPE_TO_TORCH_DTYPE.items()}
    assert {name: f"torch.{model_dtype(name, {})}" for name in DTYPE_NAMES} == expected
    with pytest.raises(HyperDFlashConfigError, match=r"--dtype must be one of auto, .* found int8"):
        model_dtype("int8", {})
