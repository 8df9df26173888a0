"""The architectures of Transformers that networks are written as and read from: options, names and config.json.

A network is written only with options that every reader of its architecture computes. Others are refused: llama.cpp and
MLX take SiLU in Llama and Qwen3 whatever config.json says, and neither has windows there.
"""

from dataclasses import replace

import torch

from errors import require
from model import LAYERNORM_EPSILON, RMSNORM_EPSILON, GPTConfig
from training.checkpoint import empty_model

# Hugging Face's name: ours. Of several names for one of ours, the last is written.
GELUS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
GPT2_VOCABULARY = 50257

# Options that a network must have, with the values that are allowed; the first one is advised.
KESTREL = dict(position=["rope"], norm=["rmsnorm"], mlp=["relu2"], bias=[False], mask_documents=[False],
               embed_norm=[False])  # fmt: skip
NANOCHAT = KESTREL | dict(window=[None], embed_skip=[False], value_residual=[False], key_offset=[False],
                          norm_weight=[False], qk_norm=[True], embed_norm=[True])  # fmt: skip
ARCEE = NANOCHAT | dict(norm_weight=[True, False], qk_norm=[False], embed_norm=[False], logit_softcap=[None])
LLAMA = ARCEE | dict(mlp=["swiglu"])
WRITABLE = {
    "gpt2": ARCEE | dict(position=["learned"], norm=["layernorm"], mlp=["gelu_tanh", "gelu"], bias=[True, False]),
    "llama": LLAMA,
    "qwen3": LLAMA | dict(qk_norm=[True]),
    "arcee": ARCEE,
    "nanochat": NANOCHAT,
    "kestrel": KESTREL,  # hf/modeling_kestrel.py
}
READABLE = ("gpt2", "llama", "arcee", "nanochat", "kestrel")
CLASSES = dict(gpt2="GPT2", llama="Llama", qwen3="Qwen3", arcee="Arcee", nanochat="NanoChat", kestrel="Kestrel")
# Options in a Kestrel's config.json under our names. Transformers leaves out those with these values.
KESTREL_DEFAULTS = dict(norm_weight=False, qk_norm=True, embed_skip=True, value_residual=True, key_offset=False)

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
    "": "model",
    "embed": "model.embed_tokens",
    "blocks.*.norm_1": "model.layers.*.input_layernorm",
    "blocks.*.attention": "model.layers.*.self_attn",
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


def _wrong(config, kind):
    """Options of a network that an architecture lacks, with their allowed values."""
    allowed = WRITABLE[kind] | ({"n_kv_head": [None, config.n_head]} if kind == "gpt2" else {})
    if config.key_offset:  # needs the key before the oldest visible one, which the cache of a window drops
        allowed = allowed | {"window": [None]}
    return {name: values for name, values in allowed.items() if getattr(config, name) not in values}


def kind_of(config, kinds=tuple(WRITABLE)):
    """The architecture that a network is written as, or the nearest one."""
    return min(kinds, key=lambda kind: len(_wrong(config, kind)))


def require_writable(config, kinds=tuple(WRITABLE), how="exported"):
    """The architecture of a network; UserError if none of `kinds` has its options."""
    kind = kind_of(config, kinds)
    wrong = _wrong(config, kind)
    found = ", ".join(f"{name}={getattr(config, name)}" for name in wrong)
    advice = " ".join(f"--{name} {values[0]}" for name, values in wrong.items())
    rule = f"this network would be written as {CLASSES[kind]}; train one with {advice}"
    require(not wrong, f"{found} cannot be {how}: {rule}")
    return kind


def parameters_of(config):
    """Yield (our name, shape, their name) of all parameters of a network; a tied head is left out."""
    names = dict(gpt2=GPT2_NAMES, nanochat=NANOCHAT_NAMES).get(kind_of(config), LLAMA_NAMES)
    for name, parameter in empty_model(config, "meta").named_parameters():
        module, _, kind = name.rpartition(".")
        number = module.split(".")[1] if module.startswith("blocks.") else ""
        theirs = names[module.replace(number, "*", 1) if number else module]
        yield name, parameter.shape, f"{theirs.replace('*', number)}.{kind}"


def is_transposed(key):
    """GPT-2 keeps the matrices of its blocks as [inputs, outputs]."""
    return key.endswith(".weight") and ".c_" in key


def exchange_halves(weight, head_dim):
    """The rows [heads D, C] of a query or key matrix with the halves of each head exchanged.

    NanoChat rotates queries and keys the other way round. With exchanged halves, that is our way.
    """
    return weight.unflatten(0, (-1, 2, head_dim // 2)).flip(1).flatten(0, 2)


def their_weights(weights, config):
    """The tensors of a Hugging Face file, for the state_dict of a GPT. Missing biases are 0, missing weights 1."""
    theirs, architecture = {}, kind_of(config)
    has_weights = config.norm_weight or architecture not in ("nanochat", "kestrel")
    for name, shape, key in parameters_of(replace(config, bias=config.position == "learned", norm_weight=has_weights)):
        absent = torch.full(shape, float(name.endswith("weight")))
        value = weights.get(name, absent)[: shape[0]]  # without the padding of the vocabulary
        if "[qkv]" in key:
            heads = (config.n_head, config.kv_heads, config.kv_heads)
            for part, rows in zip("qkv", value.split([count * config.head_dim for count in heads]), strict=True):
                flipped = architecture == "nanochat" and part != "v"
                theirs[key.replace("[qkv]", part)] = exchange_halves(rows, config.head_dim) if flipped else rows.clone()
            if architecture == "qwen3":  # its norms of queries and keys have weights, ours do not
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
            activation_function=gelu, layer_norm_epsilon=config.norm_eps or LAYERNORM_EPSILON,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
    if kind in ("nanochat", "kestrel"):
        common |= dict(final_logit_softcapping=config.logit_softcap, pad_token_id=None)
    if kind == "kestrel":
        classes = dict(AutoConfig="Config", AutoModel="Model", AutoModelForCausalLM="ForCausalLM")
        common |= {name: getattr(config, name) for name in KESTREL_DEFAULTS}
        common |= dict(
            auto_map={name: f"modeling_kestrel.Kestrel{value}" for name, value in classes.items()},
            sliding_window=config.window, layer_types=[
                "full_attention" if config.window is None or i % 4 == 3 else "sliding_attention"
                for i in range(config.n_layer)
            ],
        )  # fmt: skip
    return common | dict(
        hidden_size=config.n_embd, intermediate_size=config.mlp_width, num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head, num_key_value_heads=config.kv_heads, head_dim=config.head_dim,
        max_position_embeddings=config.block_size, hidden_act="relu2" if config.mlp == "relu2" else "silu",
        rms_norm_eps=config.norm_eps or RMSNORM_EPSILON, attention_bias=False, mlp_bias=False, attention_dropout=0.0,
        rope_theta=config.rope_theta, rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )  # fmt: skip


def read_config(theirs, folder):
    """GPTConfig for the dict of a config.json; UserError if the network has what ours lacks."""
    kind = theirs.get("model_type", "unknown")
    rule = f"only {', '.join(READABLE)} and folders of hf.export can be read"
    learned = "its norms of queries and keys have learned weights, which ours (qk_norm) lack"
    require(kind != "qwen3", f"{folder} holds a qwen3 model: {learned}; {rule}")
    require(kind in READABLE, f"{folder} holds a {kind} model; {rule}")
    return _read_gpt2(theirs, folder) if kind == "gpt2" else _read_llama(theirs, kind, folder)


def _read_gpt2(theirs, folder):
    defaults = dict(vocab_size=GPT2_VOCABULARY, n_positions=1024, n_layer=12, n_head=12, n_embd=768, n_inner=None,
                    activation_function="gelu_new", layer_norm_epsilon=LAYERNORM_EPSILON, scale_attn_weights=True,
                    scale_attn_by_inverse_layer_idx=False, tie_word_embeddings=True)  # fmt: skip
    theirs = defaults | theirs
    _require_only(theirs, folder, dict(
        scale_attn_weights=[True], scale_attn_by_inverse_layer_idx=[False], activation_function=list(GELUS),
        n_inner=[None, 4 * theirs["n_embd"]],
    ))  # fmt: skip
    return GPTConfig(
        vocab_size=theirs["vocab_size"], block_size=theirs["n_positions"], n_layer=theirs["n_layer"],
        n_head=theirs["n_head"], n_embd=theirs["n_embd"], tie_head=theirs["tie_word_embeddings"], bias=True,
        mlp=GELUS[theirs["activation_function"]], norm_eps=_epsilon(theirs["layer_norm_epsilon"], LAYERNORM_EPSILON),
    )  # fmt: skip


def _read_llama(theirs, kind, folder):
    """Of Llama, Arcee, NanoChat and Kestrel."""
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}  # the latter: before Transformers 5
    defaults = dict(tie_word_embeddings=False, num_key_value_heads=None, head_dim=None, attention_bias=False,
                    mlp_bias=False, hidden_act="silu" if kind == "llama" else "relu2",
                    rope_theta=10000.0, rope_type=rope.get("type", "default"), rope_interleaved=False,
                    partial_rotary_factor=1.0, sliding_window=None,
                    final_logit_softcapping=15.0 if kind == "nanochat" else None)  # fmt: skip
    theirs = defaults | theirs | rope
    parts = {}
    if kind == "nanochat":
        parts = dict(norm_weight=False, qk_norm=True, embed_norm=True, logit_softcap=theirs["final_logit_softcapping"])
    elif kind == "kestrel":
        parts = {name: theirs.get(name, value) for name, value in KESTREL_DEFAULTS.items()}
        parts |= dict(logit_softcap=theirs["final_logit_softcapping"], window=theirs["sliding_window"])
    heads = theirs["num_attention_heads"]
    network = GPTConfig(
        **parts, norm="rmsnorm", position="rope", mlp="swiglu" if kind == "llama" else "relu2",
        vocab_size=theirs["vocab_size"], block_size=theirs["max_position_embeddings"],
        n_layer=theirs["num_hidden_layers"], n_head=heads, n_kv_head=theirs["num_key_value_heads"] or heads,
        n_embd=theirs["hidden_size"], tie_head=theirs["tie_word_embeddings"], rope_theta=theirs["rope_theta"],
        norm_eps=_epsilon(theirs["rms_norm_eps"], RMSNORM_EPSILON),
    )  # fmt: skip
    _require_only(theirs, folder, dict(
        hidden_act=[defaults["hidden_act"]], intermediate_size=[network.mlp_width], attention_bias=[False],
        mlp_bias=[False], head_dim=[None, network.head_dim], rope_type=["default"],
        rope_interleaved=[False], partial_rotary_factor=[1.0],
    ))  # fmt: skip
    return network


def _epsilon(value, default):
    """norm_eps of GPTConfig, where 0 means the default."""
    return 0.0 if value == default else value


def _require_only(theirs, folder, supported):
    for name, values in supported.items():
        only = " or ".join(map(str, values))
        rule = f"is not supported, only {only}; take another model"
        require(theirs.get(name) in values, f"{folder}: {name}={theirs.get(name)} {rule}")
