"""Plans arrive at other ranks as they were, and arrays that stay the same stay the same ones."""

from __future__ import annotations

from array import array

from headrace.parallel.frames import Order, PlanPacker, PlanUnpacker, Submit
from headrace.processes.messages import Unpacker
from headrace.request import NewRow, SamplingParams, StepPlan, StructuredOutputs

ROWS, ONES = array("i", range(200)), array("i", [1]) * 200
PARAMS = SamplingParams(
    temperature=0.5, seed=3, stop=("x",), logit_bias={5: 1.0}, structured_outputs=StructuredOutputs(regex="a+")
)


def test_plans_arrive_as_they_were() -> None:
    added = NewRow(
        1, 2, array("i", [5, 6]), 2, PARAMS, 7, (257,), bad_word_ids=((1, 2),), pool=("a", "b"), adapter_slot=1
    )
    same = {"rows": ROWS, "counts": ONES, "sample_work": ROWS, "sample_rows": ROWS}
    plans = [
        StepPlan(
            0,
            rows_added=(added,),
            **same,
            starts=ROWS,
            prompt_logprobs=(3,),
            masked=(0, 1),
            adapters=((0, "one", (3, 5)),),
        ),
        StepPlan(1, **same, starts=ONES, rows_dropped=array("i", [4]), shared_tokens=9),
        StepPlan(2, **{**same, "rows": array("i", range(200))}, starts=ROWS),
        StepPlan(3),
        StepPlan(4, **same, starts=ONES),
    ]
    packer, unpacker, orders = PlanPacker(), PlanUnpacker(), Unpacker(Order)
    packed = [packer.pack(plan) for plan in plans]
    assert len(packed[1]) < len(packed[4]) / 2  # what stays is not sent again
    found = []
    for plan, data in zip(plans, packed, strict=True):
        (order,) = orders.feed(data)
        assert isinstance(order, Submit)
        found.append(unpacker.unpack(order))
        assert found[-1] == plan
    assert found[1].rows is found[0].rows and found[2].rows is not found[1].rows and found[2].counts is found[0].counts
