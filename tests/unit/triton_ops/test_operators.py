"""The operators of a round: schema, fake and dispatch of each."""

import inspect

import pytest
import torch

from sglang_hyperdflash.draft.adjust import adjust_rows
from sglang_hyperdflash.draft.propose import propose_greedy_op, propose_op
from tests.unit.triton_ops import (
    test_adjust_kernel,
    test_propose_kernel,
    test_rows_kernel,
    test_verify_kernels,
)
from tests.unit.triton_ops.adjusting import EVERYTHING
from tests.unit.triton_ops.gate_help import DEVICE
from triton_ops import accept_kernel, finish_kernel, rows_kernel
from triton_ops.verification import accept, finish, row_statistics


def cases():
    """An operator and arguments of it, plain and with everything that is optional."""
    for rank, changes in ((None, ""), (3, EVERYTHING)):
        known = test_propose_kernel.arguments(3, 2, 5, rank=rank, changes=changes)
        yield propose_op.default, test_propose_kernel.on_device(known)
        greedy = test_propose_kernel.of_greedy(known)
        yield propose_greedy_op.default, test_propose_kernel.on_device(greedy)
    known = test_adjust_kernel.arguments(3, 2, 9)
    known["logits"].nan_to_num_()
    yield adjust_rows.default, [t.to(DEVICE) for t in known.values()]
    rows = test_rows_kernel.batch(4, 2, 40)
    for kept in (None, test_rows_kernel.half_kept(rows)):
        yield row_statistics.default, [*rows.values(), kept, True]
    correct = torch.arange(3, dtype=torch.int32, device=DEVICE)
    for filtered in (False, True):
        given = test_verify_kernels.make_round(3, 2, 4, 20, filtered=filtered)
        yield accept.default, given
        yield finish.default, test_verify_kernels.of_finish(given, correct, correct.double())
    yield accept.default, given | test_verify_kernels.BARE


CASES = list(cases())


@pytest.mark.parametrize(("operator", "arguments"), CASES, ids=[str(op) for op, _ in CASES])
def test_the_operators_schema_and_fake_are_true(operator, arguments):
    named, checks = isinstance(arguments, dict), ("test_schema", "test_faketensor")
    given = ((), arguments) if named else (tuple(arguments), {})
    torch.library.opcheck(operator, *given, test_utils=checks)


KERNELS = [(row_statistics, rows_kernel), (accept, accept_kernel), (finish, finish_kernel)]


@pytest.mark.parametrize("operator, kernel", KERNELS, ids=["rows", "accept", "finish"])
def test_a_launch_takes_the_schema_s_arguments_in_their_order(operator, kernel):
    """By position, as an operator calls it; the kernels' tests call it by name."""
    expected = [argument.name for argument in operator.default._schema.arguments]
    assert list(inspect.signature(kernel.launch).parameters) == expected
