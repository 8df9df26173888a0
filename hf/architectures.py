"""The architectures of Transformers that networks are written as and read from: options, names and config.json.

A network is written only with options that every reader of its architecture computes. Others are refused, also those
that no list here names: llama.cpp and MLX take SiLU in Llama and Qwen3 whatever config.json says, and neither has
windows there.
"""

from dataclasses import fields, replace
from typing import NamedTuple

import torch

from errors import require
from model import GPT, LAYERNORM_EPSILON, RMSNORM_EPSILON, GPTConfig


class Architecture(NamedTuple):
    """An architecture of Transformers."""

    name: str  # of its classes
    allowed: dict  # options that a network must have, and their values; the first is advised, and taken when reading
    options: dict  # our options and their names in config.json
    modules: dict  # our modules and theirs


# Activations: Hugging Face's name, and ours. Of several names for one of ours, the last is written.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "silu": "swiglu",
    "relu2": "relu2",
}

KESTREL = dict(position=["rope"], norm=["rmsnorm"], mlp=["relu2"], bias=[False], mask_documents=[False],
               embed_norm=[False])  # fmt: skip
NANOCHAT = KESTREL | dict(window=[None], embed_skip=[False], value_residual=[False], key_offset=[False],
                          norm_weight=[False], qk_norm=[True], embed_norm=[True])  # fmt: skip
ARCEE = NANOCHAT | dict(norm_weight=[True, False], qk_norm=[False], embed_norm=[False], logit_softcap=[None])
LLAMA = ARCEE | dict(mlp=["swiglu"])
GPT2 = ARCEE | dict(position=["learned"], norm=["layernorm"], mlp=["gelu_tanh", "gelu"], bias=[True, False],
                    n_kv_head=[None])  # fmt: skip

GPT2_OPTIONS = dict(
    vocab_size="vocab_size", block_size="n_positions", n_layer="n_layer", n_embd="n_embd", n_head="n_head",
    norm_eps="layer_norm_epsilon", tie_head="tie_word_embeddings",
)  # fmt: skip
LLAMA_OPTIONS = dict(
    vocab_size="vocab_size", block_size="max_position_embeddings", n_layer="num_hidden_layers", n_embd="hidden_size",
    n_head="num_attention_heads", n_kv_head="num_key_value_heads", rope_theta="rope_theta", norm_eps="rms_norm_eps",
    tie_head="tie_word_embeddings",
)  # fmt: skip
NANOCHAT_OPTIONS = LLAMA_OPTIONS | dict(logit_softcap="final_logit_softcapping")
# Options in a Kestrel's config.json under our names. Transformers leaves out those with these values.
KESTREL_DEFAULTS = dict(norm_weight=False, qk_norm=True, embed_skip=True, value_residual=True, key_offset=False)
KESTREL_OPTIONS = NANOCHAT_OPTIONS | dict(window="sliding_window") | {name: name for name in KESTREL_DEFAULTS}
EPSILONS = dict(layernorm=LAYERNORM_EPSILON, rmsnorm=RMSNORM_EPSILON)  # which norm_eps = 0 stands for
# Options that do not change what a trained network computes (rope_theta: one with learned positions).
UNWRITTEN = ("dropout", "attention", "end_of_text", "rope_theta")

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

ARCHITECTURES = {
    "gpt2": Architecture("GPT2", GPT2, GPT2_OPTIONS, GPT2_NAMES),
    "llama": Architecture("Llama", LLAMA, LLAMA_OPTIONS, LLAMA_NAMES),
    "qwen3": Architecture("Qwen3", LLAMA | dict(qk_norm=[True]), LLAMA_OPTIONS, LLAMA_NAMES),
    "arcee": Architecture("Arcee", ARCEE, LLAMA_OPTIONS, LLAMA_NAMES),
    "nanochat": Architecture("NanoChat", NANOCHAT, NANOCHAT_OPTIONS, NANOCHAT_NAMES),
    "kestrel": Architecture("Kestrel", KESTREL, KESTREL_OPTIONS, LLAMA_NAMES),  # hf/modeling_kestrel.py
}
READABLE = ("gpt2", "llama", "arcee", "nanochat", "kestrel")


def _wrong(config, kind):
    """Options of a network with values that an architecture lacks: {name: values that it has}."""
    allowed = dict(ARCHITECTURES[kind].allowed)
    if kind == "gpt2":
        allowed["n_kv_head"] = [None, config.n_head]  # one for each query head
    if config.key_offset:  # needs the key before the oldest visible one, which the cache of a window drops
        allowed["window"] = [None]
    return {name: values for name, values in allowed.items() if getattr(config, name) not in values}


def kind_of(config, kinds=tuple(ARCHITECTURES)):
    """The architecture that a network is written as, or the nearest one."""
    return min(kinds, key=lambda kind: len(_wrong(config, kind)))


def require_writable(config, kinds=tuple(ARCHITECTURES), how="exported"):
    """The architecture of a network; UserError if none of `kinds` has its options."""
    kind = kind_of(config, kinds)
    architecture = ARCHITECTURES[kind]
    known = {*architecture.allowed, *architecture.options, *UNWRITTEN}
    unknown = ", ".join(field.name for field in fields(config) if field.name not in known)
    wrong = _wrong(config, kind)
    require(not unknown, f"{unknown} cannot be {how}: add it to the options that hf/architectures.py writes")
    found = ", ".join(f"{name}={getattr(config, name)}" for name in wrong)
    advice = " ".join(f"--{name} {values[0]}" for name, values in wrong.items())
    rule = f"this network would be written as {architecture.name}; train one with {advice}"
    require(not wrong, f"{found} cannot be {how}: {rule}")
    return kind


def parameters_of(config):
    """Yield (our name, shape, their names) of all parameters of a network; a tied head is left out.

    There is one name of theirs or, where the rows of our qkv are three matrices, those of q, k and v.
    """
    modules = ARCHITECTURES[kind_of(config)].modules
    with torch.device("meta"):
        model = GPT(config, seed=None)
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        number = module.split(".")[1] if module.startswith("blocks.") else ""
        theirs = modules[module.replace(number, "*", 1) if number else module].replace("*", number)
        parts = "qkv" if "[qkv]" in theirs else "q"
        yield name, parameter.shape, [f"{theirs.replace('[qkv]', part)}.{kind}" for part in parts]


def switch_layout(key, value, config):
    """A tensor of ours as their file has it, under the name `key`, or theirs as ours: each change undoes itself."""
    if key.endswith(".weight") and ".c_" in key:  # GPT-2 keeps the matrices of its blocks as [inputs, outputs]
        return value.T
    if kind_of(config) == "nanochat" and key.endswith(("q_proj.weight", "k_proj.weight")):
        # It rotates the other way round, which is our way after exchanging the halves of each head
        return value.unflatten(0, (-1, 2, config.head_dim // 2)).flip(1).flatten(0, 2)
    return value


def their_weights(weights, config):
    """The tensors of a Hugging Face file, for the state_dict of a GPT. Missing biases are 0, missing weights 1."""
    theirs, architecture = {}, kind_of(config)
    has_weights = config.norm_weight or architecture not in ("nanochat", "kestrel")
    rows = [heads * config.head_dim for heads in (config.n_head, config.kv_heads, config.kv_heads)]
    for name, shape, keys in parameters_of(replace(config, bias=config.position == "learned", norm_weight=has_weights)):
        absent = torch.full(shape, float(name.endswith("weight")), device="cpu")
        value = weights.get(name, absent)[: shape[0]]  # without the padding of the vocabulary
        parts = value.split(rows) if len(keys) == 3 else [value]
        for key, part in zip(keys, parts, strict=True):
            theirs[key] = switch_layout(key, part, config).clone(memory_format=torch.contiguous_format)
        if architecture == "qwen3" and len(keys) == 3:  # its norms of queries and keys have weights, ours do not
            theirs |= {key.replace("_proj", "_norm"): torch.ones(config.head_dim, device="cpu") for key in keys[:2]}
    return theirs


def config_json(config, end, dtype):
    """config.json for a network. end: id of the end-of-text token, or None. dtype: of the weights, a str.

    Raises:
        UserError: no architecture has these options.
    """
    kind = require_writable(config)
    architecture = ARCHITECTURES[kind]
    explicit = replace(config, n_kv_head=config.kv_heads, norm_eps=config.norm_eps or EPSILONS[config.norm])
    theirs = {name: getattr(explicit, option) for option, name in architecture.options.items()}
    theirs |= dict(model_type=kind, dtype=dtype, bos_token_id=end, eos_token_id=end, pad_token_id=None)
    activation = {ours: name for name, ours in ACTIVATIONS.items()}[config.mlp]
    if kind == "gpt2":
        return theirs | dict(architectures=["GPT2LMHeadModel"], activation_function=activation,
                             attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)  # fmt: skip
    if kind == "kestrel":
        classes = dict(AutoConfig="Config", AutoModel="Model", AutoModelForCausalLM="ForCausalLM")
        theirs["auto_map"] = {name: f"modeling_kestrel.Kestrel{value}" for name, value in classes.items()}
        theirs["layer_types"] = [
            "full_attention" if config.window is None or i % 4 == 3 else "sliding_attention"
            for i in range(config.n_layer)
        ]
    return theirs | dict(
        architectures=[f"{architecture.name}ForCausalLM"], intermediate_size=config.mlp_width, head_dim=config.head_dim,
        hidden_act=activation, rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )  # fmt: skip


def read_config(theirs, folder):
    """GPTConfig for the dict of a config.json; UserError if the network has what ours lacks."""
    kind = theirs.get("model_type", "unknown")
    rule = f"only {', '.join(READABLE)} and folders of export.py can be read"
    require(kind in READABLE, f"{folder} holds a {kind} model; {rule}")
    allowed, names = ARCHITECTURES[kind].allowed, ARCHITECTURES[kind].options
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}  # the latter: before Transformers 5
    defaults = KESTREL_DEFAULTS | dict(
        tie_word_embeddings=kind == "gpt2", activation_function="gelu_new", rope_theta=10000.0, sliding_window=None,
        rope_type=rope.get("type", "default"), final_logit_softcapping=15.0 if kind == "nanochat" else None,
        num_key_value_heads=None,
    )  # fmt: skip
    theirs = defaults | theirs | rope
    theirs["num_key_value_heads"] = theirs["num_key_value_heads"] or theirs.get("num_attention_heads")
    for name in names.values():
        require(name in theirs, f"{folder}/config.json lacks {name}; get the whole file")

    activation = "activation_function" if kind == "gpt2" else "hidden_act"
    activations = {name: ours for name, ours in ACTIVATIONS.items() if ours in allowed["mlp"]}
    _require_only(theirs, folder, {activation: list(activations)})
    options = {option: values[0] for option, values in allowed.items()}
    options |= {option: theirs[name] for option, name in names.items()}
    options["mlp"] = activations[theirs.get(activation, next(iter(activations)))]
    if options["norm_eps"] == EPSILONS[options["norm"]]:
        options["norm_eps"] = 0.0
    network = GPTConfig(**options)

    _require_only(theirs, folder, dict(
        intermediate_size=[network.mlp_width], n_inner=[None, network.mlp_width], head_dim=[None, network.head_dim],
        attention_bias=[False], mlp_bias=[False], scale_attn_weights=[True], scale_attn_by_inverse_layer_idx=[False],
        rope_type=["default"], rope_interleaved=[False], partial_rotary_factor=[1.0],
    ))  # fmt: skip
    return network


def _require_only(theirs, folder, supported):
    """UserError for an option with a value that is not supported; one that is missing has the first of them."""
    for name, values in supported.items():
        value, only = theirs.get(name, values[0]), " or ".join(map(str, values))
        require(value in values, f"{folder}: {name}={value} is not supported, only {only}; take another model")
