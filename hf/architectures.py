"""The architectures of Transformers as which networks are written: their options, names and config.json.

A network is written only with options that every reader of its architecture computes. Others are refused: llama.cpp and
MLX take SiLU in Llama and Qwen3 whatever config.json says, and neither has windows there.
"""

from dataclasses import replace

import torch

from errors import require
from model import RMSNORM_EPSILON
from training.checkpoint import empty_model

# Hugging Face's name: ours. Of several names for one of ours, the last is written.
GELUS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
LAYERNORM_EPSILON = 1e-5  # PyTorch's default, which model.py takes

# Options that a network must have, with the values that are allowed; the first one is advised.
NOWHERE = dict(window=[None], mask_documents=[False], embed_skip=[False], value_residual=[False])
GPT2 = NOWHERE | dict(norm=["layernorm"], qk_norm=[False], embed_norm=[False], logit_softcap=[None])
LLAMA = NOWHERE | dict(norm=["rmsnorm"], bias=[False], embed_norm=[False], logit_softcap=[None])
WRITABLE = {
    "gpt2": GPT2 | dict(mlp=["gelu_tanh", "gelu"]),
    "llama": LLAMA | dict(mlp=["swiglu"]),
    "qwen3": LLAMA | dict(mlp=["swiglu"]),
    "arcee": LLAMA | dict(mlp=["relu2"]),
    "nanochat": NOWHERE | dict(norm=["rmsnorm"], norm_weight=[False], bias=[False], embed_norm=[True]),
}
CLASSES = dict(gpt2="GPT2", llama="Llama", qwen3="Qwen3", arcee="Arcee", nanochat="NanoChat")

# Our modules and Hugging Face's. * is the number of a block. The rows of our qkv are those of q, k and v.
GPT2_NAMES = {
    "embed": "transformer.wte",
    "embed_position": "transformer.wpe",
    "blocks.*.norm_1": "transformer.h.*.ln_1",
    "blocks.*.attention.qkv": "transformer.h.*.attn.c_attn",
    "blocks.*.attention.project": "transformer.h.*.attn.c_proj",
    "blocks.*.norm_2": "transformer.h.*.ln_2",
    "blocks.*.mlp.expand": "transformer.h.*.mlp.c_fc",
    "blocks.*.mlp.project": "transformer.h.*.mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "blocks.*.norm_1": "model.layers.*.input_layernorm",
    "blocks.*.attention.qkv": "model.layers.*.self_attn.[qkv]_proj",
    "blocks.*.attention.project": "model.layers.*.self_attn.o_proj",
    "blocks.*.norm_2": "model.layers.*.post_attention_layernorm",
    "blocks.*.mlp.gate": "model.layers.*.mlp.gate_proj",
    "blocks.*.mlp.expand": "model.layers.*.mlp.up_proj",
    "blocks.*.mlp.project": "model.layers.*.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
NANOCHAT_NAMES = LLAMA_NAMES | {
    "blocks.*.mlp.expand": "model.layers.*.mlp.fc1",
    "blocks.*.mlp.project": "model.layers.*.mlp.fc2",
}


def kind_of(config):
    """The architecture that a network is written as, if its other options allow it."""
    if config.position == "learned":
        return "gpt2"
    if config.mlp == "relu2":
        return "nanochat" if config.qk_norm else "arcee"
    return "qwen3" if config.qk_norm else "llama"


def require_writable(config):
    """The architecture of a network; UserError if no architecture of Transformers has these options."""
    kind = kind_of(config)
    allowed = WRITABLE[kind] | ({"n_kv_head": [None, config.n_head]} if kind == "gpt2" else {})
    wrong = [name for name, values in allowed.items() if getattr(config, name) not in values]
    found = ", ".join(f"{name}={getattr(config, name)}" for name in wrong)
    advice = " ".join(f"--{name} {allowed[name][0]}" for name in wrong)
    rule = f"this network would be written as {CLASSES[kind]}; train one with {advice}"
    require(not wrong, f"{found} cannot be exported: {rule}")
    return kind


def parameters_of(config):
    """Yield (our name, shape, their name) of all parameters of a network; a tied head is left out."""
    names = GPT2_NAMES if config.position == "learned" else NANOCHAT_NAMES if is_flipped(config) else LLAMA_NAMES
    for name, parameter in empty_model(config, "meta").named_parameters():
        module, _, kind = name.rpartition(".")
        number = module.split(".")[1] if module.startswith("blocks.") else ""
        theirs = names[module.replace(number, "*", 1) if number else module]
        yield name, parameter.shape, f"{theirs.replace('*', number)}.{kind}"


def is_transposed(key):
    """GPT-2 keeps the matrices of its blocks as [inputs, outputs]."""
    return key.endswith(".weight") and ".c_" in key


def is_flipped(config):
    """NanoChat rotates queries and keys the other way round. With the halves of each head exchanged, that is our way.

    Folders that were written before the option embed_norm have Llama's names.
    """
    return kind_of(config) == "nanochat" and config.embed_norm


def exchange_halves(weight, head_dim):
    """The rows [heads D, C] of a query or key matrix with the halves of each head exchanged."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).flip(1).flatten(0, 2)


def their_weights(weights, config):
    """The tensors of a Hugging Face file, for the state_dict of a GPT. Missing biases are 0, missing weights 1.

    NanoChat has no weights in its norms.
    """
    theirs = {}
    has_weights = kind_of(config) != "nanochat"
    for name, shape, key in parameters_of(replace(config, bias=config.position == "learned", norm_weight=has_weights)):
        absent = torch.full(shape, float(name.endswith("weight")))
        value = weights.get(name, absent)[: shape[0]]  # without the padding of the vocabulary
        if "[qkv]" in key:
            heads = (config.n_head, config.kv_heads, config.kv_heads)
            for part, rows in zip("qkv", value.split([count * config.head_dim for count in heads]), strict=True):
                flipped = is_flipped(config) and part != "v"
                theirs[key.replace("[qkv]", part)] = exchange_halves(rows, config.head_dim) if flipped else rows.clone()
            if kind_of(config) == "qwen3":  # its norms of queries and keys have weights, ours do not
                for part in "qk":
                    theirs[key.replace("[qkv]_proj", f"{part}_norm")] = torch.ones(config.head_dim)
        else:
            theirs[key] = (value.T if is_transposed(key) else value).clone(memory_format=torch.contiguous_format)
    return theirs


def config_json(config, end, dtype):
    """config.json for a network. end: id of the end-of-text token, or None. dtype: of the weights, a str.

    Raises:
        UserError: no architecture has these options.
    """
    kind = require_writable(config)
    common = dict(model_type=kind, architectures=[f"{CLASSES[kind]}ForCausalLM"], vocab_size=config.vocab_size,
                  tie_word_embeddings=config.tie_head, bos_token_id=end, eos_token_id=end, dtype=dtype)  # fmt: skip
    if kind == "gpt2":
        gelu = {ours: theirs for theirs, ours in GELUS.items()}[config.mlp]
        common["architectures"] = ["GPT2LMHeadModel"]
        return common | dict(
            n_positions=config.block_size, n_embd=config.n_embd, n_layer=config.n_layer, n_head=config.n_head,
            activation_function=gelu, layer_norm_epsilon=LAYERNORM_EPSILON, attn_pdrop=0.0, embd_pdrop=0.0,
            resid_pdrop=0.0,
        )  # fmt: skip
    if kind == "nanochat":
        common |= dict(final_logit_softcapping=config.logit_softcap, pad_token_id=None)
    return common | dict(
        hidden_size=config.n_embd, intermediate_size=config.mlp_width, num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head, num_key_value_heads=config.kv_heads, head_dim=config.head_dim,
        max_position_embeddings=config.block_size, hidden_act="relu2" if config.mlp == "relu2" else "silu",
        rms_norm_eps=RMSNORM_EPSILON, rope_theta=10000.0, attention_bias=False, attention_dropout=0.0, mlp_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
