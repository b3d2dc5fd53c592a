"""Models that mix each token into the next one of its document: exact in packed rows, not with shared beginnings."""

import torch
from transformers import LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def shifted(states, position_ids):
    """States with some of the token before, where positions go on by one."""
    goes_on = (position_ids - torch.roll(position_ids, 1, -1)) == 1
    goes_on[:, 0] = False
    return states + 0.3 * torch.roll(states, 1, 1) * goes_on[..., None]


class ShiftingLayer(LlamaDecoderLayer):
    def forward(self, hidden_states, *args, position_ids=None, **kwargs):
        hidden_states = shifted(hidden_states, position_ids)
        return super().forward(hidden_states, *args, position_ids=position_ids, **kwargs)


class ShiftingLayerInTraining(ShiftingLayer):
    def forward(self, hidden_states, *args, **kwargs):
        return (super() if self.training else super(ShiftingLayer, self)).forward(hidden_states, *args, **kwargs)


class ShiftingModel(LlamaModel):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        output = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs
        )
        states = output.last_hidden_state
        if position_ids is None:
            position_ids = torch.arange(states.shape[1])[None]
        output.last_hidden_state = shifted(states, position_ids)
        return output


class ShiftingInTraining(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0] = ShiftingLayerInTraining(config, 0)
        self.post_init()


class Shifting(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = ShiftingModel(config)
        self.post_init()
