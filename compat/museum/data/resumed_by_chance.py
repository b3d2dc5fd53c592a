"""The order of an epoch is drawn from the state of chance, which a resumed run does not have yet.

resume: accelerate#4233, transgenic#59

The order of an epoch is drawn from torch's global generator when the epoch begins. A resumed run
begins it in another state, and skips the first batches of another order.
"""

mistaken = {"accelerator_config": {"use_seedable_sampler": False}}
