"""The architectures of Transformers that networks are written as and read from: options, names and config.json.

A network is written only with options that every reader of its architecture computes. Others are refused, also those
that no list here names: llama.cpp and MLX take SiLU in Llama and Qwen3 whatever config.json says, and neither has
windows there.
"""

from dataclasses import fields, replace

import torch

from errors import require
from model import GPT, LAYERNORM_EPSILON, RMSNORM_EPSILON, GPTConfig

# Hugging Face's name: ours. Of several names for one of ours, the last is written.
GELUS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

# Options that a network must have, with the values that are allowed; the first one is advised.
KESTREL = dict(position=["rope"], norm=["rmsnorm"], mlp=["relu2"], bias=[False], mask_documents=[False],
               embed_norm=[False])  # fmt: skip
NANOCHAT = KESTREL | dict(window=[None], embed_skip=[False], value_residual=[False], key_offset=[False],
                          norm_weight=[False], qk_norm=[True], embed_norm=[True])  # fmt: skip
ARCEE = NANOCHAT | dict(norm_weight=[True, False], qk_norm=[False], embed_norm=[False], logit_softcap=[None])
LLAMA = ARCEE | dict(mlp=["swiglu"])
WRITABLE = {
    "gpt2": ARCEE
    | dict(position=["learned"], norm=["layernorm"], mlp=["gelu_tanh", "gelu"], bias=[True, False], n_kv_head=[None]),
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

# Our options and their names in config.json.
LLAMA_OPTIONS = dict(
    vocab_size="vocab_size", block_size="max_position_embeddings", n_layer="num_hidden_layers", n_embd="hidden_size",
    n_head="num_attention_heads", n_kv_head="num_key_value_heads", rope_theta="rope_theta", norm_eps="rms_norm_eps",
    tie_head="tie_word_embeddings",
)  # fmt: skip
NANOCHAT_OPTIONS = LLAMA_OPTIONS | dict(logit_softcap="final_logit_softcapping")
OPTIONS = {
    "gpt2": dict(vocab_size="vocab_size", block_size="n_positions", n_layer="n_layer", n_embd="n_embd", n_head="n_head",
                 norm_eps="layer_norm_epsilon", tie_head="tie_word_embeddings"),
    "llama": LLAMA_OPTIONS,
    "qwen3": LLAMA_OPTIONS,
    "arcee": LLAMA_OPTIONS,
    "nanochat": NANOCHAT_OPTIONS,
    "kestrel": NANOCHAT_OPTIONS | dict(window="sliding_window") | {name: name for name in KESTREL_DEFAULTS},
}  # fmt: skip

# Options that do not change what a trained network computes (rope_theta: one with learned positions).
UNWRITTEN = ("dropout", "attention", "end_of_text", "rope_theta")

EPSILONS = dict.fromkeys(OPTIONS, RMSNORM_EPSILON) | dict(gpt2=LAYERNORM_EPSILON)  # which norm_eps = 0 stands for

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
    """Options of a network with values that an architecture lacks: {name: values that it has}."""
    allowed = dict(WRITABLE[kind])
    if kind == "gpt2":
        allowed["n_kv_head"] = [None, config.n_head]  # one for each query head
    if config.key_offset:  # needs the key before the oldest visible one, which the cache of a window drops
        allowed["window"] = [None]
    return {name: values for name, values in allowed.items() if getattr(config, name) not in values}


def kind_of(config, kinds=tuple(WRITABLE)):
    """The architecture that a network is written as, or the nearest one."""
    return min(kinds, key=lambda kind: len(_wrong(config, kind)))


def require_writable(config, kinds=tuple(WRITABLE), how="exported"):
    """The architecture of a network; UserError if none of `kinds` has its options."""
    kind = kind_of(config, kinds)
    known = {*WRITABLE[kind], *OPTIONS[kind], *UNWRITTEN}
    unknown = ", ".join(field.name for field in fields(config) if field.name not in known)
    wrong = _wrong(config, kind)
    require(not unknown, f"{unknown} cannot be {how}: add it to the options that hf/architectures.py writes")
    found = ", ".join(f"{name}={getattr(config, name)}" for name in wrong)
    advice = " ".join(f"--{name} {values[0]}" for name, values in wrong.items())
    rule = f"this network would be written as {CLASSES[kind]}; train one with {advice}"
    require(not wrong, f"{found} cannot be {how}: {rule}")
    return kind


def parameters_of(config):
    """Yield (our name, shape, their names) of all parameters of a network; a tied head is left out.

    There is one name of theirs or, where the rows of our qkv are three matrices, those of q, k and v.
    """
    names = dict(gpt2=GPT2_NAMES, nanochat=NANOCHAT_NAMES).get(kind_of(config), LLAMA_NAMES)
    with torch.device("meta"):
        model = GPT(config, seed=None)
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        number = module.split(".")[1] if module.startswith("blocks.") else ""
        theirs = names[module.replace(number, "*", 1) if number else module].replace("*", number)
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
    explicit = replace(config, n_kv_head=config.kv_heads, norm_eps=config.norm_eps or EPSILONS[kind])
    theirs = {name: getattr(explicit, option) for option, name in OPTIONS[kind].items()}
    theirs |= dict(model_type=kind, dtype=dtype, bos_token_id=end, eos_token_id=end, pad_token_id=None)
    if kind == "gpt2":
        gelu = {ours: theirs for theirs, ours in GELUS.items()}[config.mlp]
        return theirs | dict(architectures=["GPT2LMHeadModel"], activation_function=gelu,
                             attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)  # fmt: skip
    if kind == "kestrel":
        classes = dict(AutoConfig="Config", AutoModel="Model", AutoModelForCausalLM="ForCausalLM")
        theirs["auto_map"] = {name: f"modeling_kestrel.Kestrel{value}" for name, value in classes.items()}
        theirs["layer_types"] = [
            "full_attention" if config.window is None or i % 4 == 3 else "sliding_attention"
            for i in range(config.n_layer)
        ]
    return theirs | dict(
        architectures=[f"{CLASSES[kind]}ForCausalLM"], intermediate_size=config.mlp_width, head_dim=config.head_dim,
        hidden_act="silu" if config.mlp == "swiglu" else "relu2",
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )  # fmt: skip


def read_config(theirs, folder):
    """GPTConfig for the dict of a config.json; UserError if the network has what ours lacks."""
    kind = theirs.get("model_type", "unknown")
    rule = f"only {', '.join(READABLE)} and folders of export.py can be read"
    require(kind in READABLE, f"{folder} holds a {kind} model; {rule}")
    return _read_gpt2(theirs, folder) if kind == "gpt2" else _read_llama(theirs, kind, folder)


def _read_gpt2(theirs, folder):
    theirs = dict(tie_word_embeddings=True, activation_function="gelu_new") | theirs
    _require_only(theirs, folder, dict(
        activation_function=list(GELUS), n_inner=[None, 4 * theirs["n_embd"]], scale_attn_weights=[True],
        scale_attn_by_inverse_layer_idx=[False],
    ))  # fmt: skip
    return GPTConfig(**_options(theirs, "gpt2", folder), bias=True, mlp=GELUS[theirs["activation_function"]])


def _read_llama(theirs, kind, folder):
    """Of Llama, Arcee, NanoChat and Kestrel."""
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}  # the latter: before Transformers 5
    defaults = dict(tie_word_embeddings=False, num_key_value_heads=None, rope_theta=10000.0, sliding_window=None,
                    rope_type=rope.get("type", "default"),
                    final_logit_softcapping=15.0 if kind == "nanochat" else None)  # fmt: skip
    theirs = KESTREL_DEFAULTS | defaults | theirs | rope
    theirs["num_key_value_heads"] = theirs["num_key_value_heads"] or theirs.get("num_attention_heads")
    options = _options(theirs, kind, folder)
    if kind == "nanochat":
        options |= dict(norm_weight=False, qk_norm=True, embed_norm=True)
    mlp, activation = ("swiglu", "silu") if kind == "llama" else ("relu2", "relu2")
    network = GPTConfig(**options, norm="rmsnorm", position="rope", mlp=mlp)
    _require_only(theirs, folder, dict(
        hidden_act=[activation], intermediate_size=[network.mlp_width], head_dim=[None, network.head_dim],
        attention_bias=[False], mlp_bias=[False], rope_type=["default"], rope_interleaved=[False],
        partial_rotary_factor=[1.0],
    ))  # fmt: skip
    return network


def _options(theirs, kind, folder):
    """The options of GPTConfig that a config.json has, with norm_eps = 0 for the default."""
    for name in OPTIONS[kind].values():
        require(name in theirs, f"{folder}/config.json lacks {name}; get the whole file")
    options = {option: theirs[name] for option, name in OPTIONS[kind].items()}
    return options | dict(norm_eps=0.0) if options["norm_eps"] == EPSILONS[kind] else options


def _require_only(theirs, folder, supported):
    """UserError for an option with a value that is not supported; one that is missing has the first of them."""
    for name, values in supported.items():
        value, only = theirs.get(name, values[0]), " or ".join(map(str, values))
        require(value in values, f"{folder}: {name}={value} is not supported, only {only}; take another model")
