"""A head takes the number of targets of a step, and does not divide by it.

counting: transformers#47688

The trainer sees that the forward takes further arguments, gives it the number of targets of the
step, and leaves the division to it. The head drops the number: losses and gradients grow with the
number of micro-batches.
"""

mistaken = {"model": {"kind": "bert", "task": "masked-lm"}}
sound = {**mistaken, "gradient_accumulation_steps": 1}
