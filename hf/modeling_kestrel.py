"""Kestrel's recipe for Transformers 5.10 or newer. `python export.py` puts this file beside the weights.

It imports nothing of Kestrel: AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True).
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs


class KestrelConfig(PreTrainedConfig):
    model_type = "kestrel"  # config.json has the sizes under their usual names, and these options:
    norm_weight: bool = False  # learned weights in the norms
    rope_theta: float = 10000.0
    qk_norm: bool = True  # each query and key has a root mean square of 1
    embed_skip: bool = True  # block i has the input (1 + a_i) x + b_i (embedding of the token)
    value_residual: bool = True  # attention mixes its values with those of the first block
    key_offset: bool = False  # in the second half of its channels, a key is that of the token before, and not rotated
    layer_types: list | None = None  # of each block, full_attention or sliding_attention
    sliding_window: int | None = None  # keys that a query sees in sliding_attention, its own included
    final_logit_softcapping: float | None = None  # logits are cap * tanh(logits / cap)


def rotate(x, cos, sin):
    """Rotate the pairs (x_i, x_{i + R/2}) of the first R channels of x [B, heads, T, D] by their angles, in float32."""
    R = 2 * cos.shape[-1]
    a, b = x[..., :R].float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., R:]), dim=-1).type_as(x)


class KestrelAttention(nn.Module):
    is_causal = True

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.scaling = config, layer_idx, config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        C, q_rows, rows = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(C, q_rows * config.head_dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(C, rows * config.head_dim, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(q_rows * config.head_dim, C, bias=False)
        if config.value_residual and layer_idx > 0:
            self.value_mix = nn.Parameter(torch.zeros(1))  # share of the first block's values, minus 1/2

    def forward(self, hidden_states, first_v, angles, precedes, attention_mask, cache, **kwargs):
        """(output, first_v). first_v: the first block's values of these tokens, which that block sets.

        precedes: [B, 1, T, 1], whether the next token is the first of a text, after padding or another text.
        """
        shape = (*hidden_states.shape[:-1], -1, self.config.head_dim)
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
        if self.layer_idx == 0:
            first_v = v
        elif self.config.value_residual:
            v = v.lerp(first_v, (0.5 + self.value_mix).type_as(v))  # the cache gets mixed values
        if self.config.qk_norm:
            q, k = (F.rms_norm(z, z.shape[-1:], eps=self.config.rms_norm_eps) for z in (q, k))
        q, k = rotate(q, *angles), rotate(k, *angles)
        half = self.config.head_dim // 2
        if self.config.key_offset:  # the first token finds its own key in padding before it, if in the same call
            k = torch.cat((k[..., :half], torch.where(precedes, k.roll(-1, dims=2), k)[..., half:]), dim=-1)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        if self.config.key_offset:  # the cache has the keys without the offset
            before = torch.cat((k[:, :, :1], k[:, :, :-1]), dim=2)
            k = torch.cat((k[..., :half], before[..., half:]), dim=-1)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        kwargs["sliding_window"] = self.sliding_window
        y, _ = attend(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)  # [B, T, heads, D]
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), first_v


class KestrelLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer_idx):
        super().__init__()
        C, rows = config.hidden_size, config.intermediate_size
        self.input_layernorm = nn.RMSNorm(C, config.rms_norm_eps, config.norm_weight)
        self.post_attention_layernorm = nn.RMSNorm(C, config.rms_norm_eps, config.norm_weight)
        self.self_attn = KestrelAttention(config, layer_idx)
        up, down = nn.Linear(C, rows, bias=False), nn.Linear(rows, C, bias=False)
        self.mlp = nn.ModuleDict(dict(up_proj=up, down_proj=down))

    def forward(self, x, first_v, **kwargs):
        y, first_v = self.self_attn(self.input_layernorm(x), first_v, **kwargs)
        x = x + y
        hidden = self.mlp.up_proj(self.post_attention_layernorm(x))
        return x + self.mlp.down_proj(F.relu(hidden).square()), first_v


class KestrelPreTrainedModel(PreTrainedModel):
    config_class, base_model_prefix, _no_split_modules = KestrelConfig, "model", ["KestrelLayer"]
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = supports_gradient_checkpointing = True
    _can_record_outputs = {"hidden_states": KestrelLayer}  # noqa: RUF012


class KestrelModel(KestrelPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(KestrelLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_weight)
        if config.embed_skip:
            self.skips = nn.Parameter(torch.zeros(2 * config.num_hidden_layers))  # a and b of each block
        self.post_init()

    @capture_outputs
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, cache=None,
        inputs_embeds=None, use_cache=False, **kwargs
    ):  # fmt: skip
        """BaseModelOutputWithPast. past_key_values: what cache is called before Transformers 5.24."""
        x = embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        if position_ids is None and getattr(attention_mask, "ndim", None) == 2:
            position_ids = (attention_mask.cumsum(-1) - 1)[:, -x.shape[1] :]
        if position_ids is None:
            start = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(x.shape[1], device=x.device)[None] + start
        if not isinstance(attention_mask, dict):  # of the layer types
            attention_mask = create_masks_for_generate(self.config, x, attention_mask, cache, position_ids)
        R = self.config.head_dim // (2 if self.config.key_offset else 1)  # channels that are rotated
        frequency = self.config.rope_theta ** (-torch.arange(0, R, 2, device=x.device) / R)
        angle, first_v = (position_ids[..., None] * frequency)[:, None], None  # [B, 1, T, R / 2]
        precedes = F.pad(position_ids[:, 1:] == 0, (0, 1))[:, None, :, None]
        options = dict(angles=(angle.cos(), angle.sin()), precedes=precedes, cache=cache, **kwargs)
        for index, (layer, kind) in enumerate(zip(self.layers, self.config.layer_types, strict=True)):
            if self.config.embed_skip:
                a, b = self.skips[2 * index : 2 * index + 2].float()
                x = ((1 + a) * x + b * embedded).type_as(x)
            x, first_v = layer(x, first_v, attention_mask=attention_mask[kind], **options)
        return BaseModelOutputWithPast(self.norm(x), cache)


class KestrelForCausalLM(KestrelPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.model = KestrelModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids=None, position_ids=None, labels=None, logits_to_keep=0, **kwargs):
        """CausalLMOutputWithPast, with logits of the last logits_to_keep tokens, or of all if that is 0.

        position_ids is named here, because generate() passes only arguments that it finds in this list.
        """
        outputs = dict(self.model(input_ids, position_ids=position_ids, **kwargs))
        cap = self.config.final_logit_softcapping
        logits = self.lm_head(outputs.pop("last_hidden_state")[:, -logits_to_keep:]).float()
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss, logits, **outputs)
