"""Writes a GGUF file, which llama.cpp and Ollama run, with the package gguf.

llama.cpp has GPT-2, Llama, Qwen3 and Arcee, and byte-level BPE for all our tokenizers. Its GELU is the tanh
approximation, on a CPU rounded to float16. Each changes logits by a thousandth, so exact GELU is written too.
"""

from data.chat import END, chat_template, has_turns
from data.files import optional
from data.hub_tokenizer import HubTokenizer
from data.tokenizer import CHARACTER_PATTERN, GPT2_PATTERN, GPT4_PATTERN, LINE_PATTERN, end_of_text, is_char
from errors import require
from hf.architectures import EPSILONS, require_writable, switch_layout, their_weights
from hf.tokenizer_json import letters_of, merged_pairs, vocabulary_of

# llama.cpp's names of our patterns. Bytes and characters are never merged, so that any pattern does.
PATTERNS = {GPT4_PATTERN: "llama-bpe", GPT2_PATTERN: "gpt-2", LINE_PATTERN: "gpt-2", CHARACTER_PATTERN: "gpt-2"}


def make_writer(found, config, dtype):
    """A gguf.GGUFWriter that holds a Pretrained.

    Args:
        config: its GPTConfig, with a vocab_size without padding. dtype: of the matrices; norms and biases are float32.

    Raises:
        UserError: llama.cpp has no such network or tokenizer.
    """
    gguf = optional("gguf", "writing GGUF")
    kind = require_writable(config, ("gpt2", "llama", "qwen3", "arcee"), "written as GGUF")
    writer = gguf.GGUFWriter(None, kind)
    _write_tokenizer(writer, gguf.TokenType, found.tokenizer)
    half = str(dtype) == "torch.float16"
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.n_head)
    epsilon = config.norm_eps or EPSILONS[config.norm]
    if kind == "gpt2":
        writer.add_layer_norm_eps(epsilon)
    else:
        writer.add_head_count_kv(config.kv_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_layer_norm_rms_eps(epsilon)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.n_layer)
    for key, value in their_weights(found.weights, config).items():
        if kind in ("llama", "arcee") and key.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates (x_2i, x_2i+1) where we rotate (x_i, x_i+D/2)
            value = value.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        value = switch_layout(key, value, config)
        matrix = value.dim() == 2 and "wpe" not in key  # llama.cpp adds positions, norms and biases in float32
        value = value.to(dtype) if matrix else value.float()
        writer.add_tensor(names.get_name(key, (".weight", ".bias")), value.contiguous().numpy())
    return writer


def _write_tokenizer(writer, types, tokenizer):
    """Write vocabulary and merges. types: gguf.TokenType."""
    rule = "it is another model's; convert its folder, or an exported one, with llama.cpp's convert_hf_to_gguf.py"
    require(not isinstance(tokenizer, HubTokenizer), f"tokenizer {tokenizer.name} cannot be written as GGUF: {rule}")
    vocabulary, end, special = vocabulary_of(tokenizer), end_of_text(tokenizer), tokenizer._special_tokens
    if is_char(tokenizer):
        rule = "llama.cpp ends texts at a token, and characters leave none free; train with --tokenizer char+eot"
        require(end is not None, f"tokenizer {tokenizer.name} cannot be written as GGUF: {rule}")
        characters = [letters for letters in vocabulary if letters not in special]
        pairs = [(letters[:cut], letters[cut]) for letters in characters for cut in range(1, len(letters))]
    else:
        pairs = [map(letters_of, pair) for pair in merged_pairs(tokenizer._mergeable_ranks)]
        if end is None:  # llama.cpp would take token 11. This byte is in no text
            end = vocabulary[letters_of(b"\xff")]
    texts = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PATTERNS[tokenizer._pat_str])
    writer.add_token_list(texts)
    writer.add_token_types([types.CONTROL if text in special else types.NORMAL for text in texts])
    merges = [" ".join(pair) for pair in pairs]
    writer.add_token_merges(merges or ["aa aa"])  # it requires one; nothing makes "aa", so this one never happens
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    if has_turns(tokenizer):
        writer.add_eot_token_id(special[END])
        writer.add_chat_template(chat_template(tokenizer))
