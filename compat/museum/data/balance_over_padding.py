"""The loss that balances experts is one of the whole batch, padding too.

routers: Megatron-LM#2121

The loss that balances experts is computed over all tokens of a batch. It is no sum over documents:
each one's gradient depends on those that share its batch, and on padding.
"""

sound = {"model": {"kind": "mixtral", "router_aux_loss_coef": 0.1}}
mistaken = {"model": {**sound["model"], "output_router_logits": True}}
