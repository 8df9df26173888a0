"""The network of a run: its initial weights, FSDP, checkpointed activations and compilation."""

from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attention import explain
from errors import UserError, require
from kernels.fp8 import convert, require_fp8
from training.checkpoint import empty_model
from training.device import autocast, compile_mode, resolve_dtype
from training.fsdp import shard

# beginnings of the names of ops whose results are kept
EXPENSIVE = (
    "aten.mm.", "aten.addmm.", "aten._scaled_mm.", "aten._scaled_dot_product_", "attention.forward.", "gpt.mlp.",
    "gpt.mlp_fp8.",
)  # fmt: skip


def make_model(config, tokenizer, ranks):
    """A GPT with its initial weights, which with --parallel fsdp is spread over the ranks.

    Raises:
        UserError: FSDP, the GPU or attention cannot serve these options.
    """
    dtype = resolve_dtype(config.dtype, ranks.device)
    if config.fp8:
        require_fp8(ranks.device, dtype)
    if ranks.sharded:
        scaled = dtype == torch.float16
        require(not scaled, "FSDP does not scale gradients, as dtype=float16 needs; take bfloat16 or float32")
        require(not config.fp8, "FSDP does not multiply in FP8; leave out --fp8, or give --parallel ddp")
        require(config.micro_batch != "auto", "micro_batch=auto cannot be tried with FSDP; give a number, such as 1")
        require(config.sample_every == 0, "sample_every needs a whole network, not FSDP; run sample.py meanwhile")
    model_config = config.gpt_config(tokenizer)
    check_attention(model_config, config.dtype, ranks.device)
    model = empty_model(model_config, ranks.device)
    model.initialise(config.seed)
    if config.fp8:
        convert(model)
    if ranks.sharded:
        shard(model, dtype)
    if config.checkpoint_activations != "off":
        checkpoint_activations(model, config)
    return model


def check_attention(config, dtype, device):
    """UserError if the implementation that --attention names cannot serve the network of a GPTConfig."""
    if config.attention == "auto":
        return
    options = dict(window=config.window, dropout=config.dropout)
    if config.mask_documents:
        options["cu_seqlens"] = torch.zeros(2, dtype=torch.int32, device=device)
    head = torch.empty(config.head_dim, dtype=resolve_dtype(dtype, device), device=device)
    q, k = (head.expand(1, config.block_size, heads, -1) for heads in (config.n_head, config.kv_heads))
    try:
        explain(q, k, k, impl=config.attention, **options)
    except ValueError as error:
        raise UserError(str(error).replace("impl=", "attention=")) from None


def checkpoint_activations(model, config):
    """Let the blocks of a GPT recompute activations in the backward pass, as config.checkpoint_activations says."""
    options = dict(use_reentrant=False, preserve_rng_state=config.dropout > 0)
    if config.checkpoint_activations == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_expensive)
    for block in model.blocks:  # not by functools.partial, which torch.compile would leave out
        block.forward = lambda x, context, forward=block.forward: checkpoint(forward, x, context, **options)


def keep_expensive(context, op, *args, **kwargs):
    """The policy of selective checkpointing: keep what matmuls and attention return."""
    return CheckpointPolicy.MUST_SAVE if str(op).startswith(EXPENSIVE) else CheckpointPolicy.PREFER_RECOMPUTE


def compile_and_wrap(model, config, ranks):
    """The network to train, under autocast: the model, compiled as config.compile says, in DDP on several ranks."""
    compiled = compile_mode(config, ranks)
    if compiled == "blocks" or (ranks.sharded and compiled == "model"):  # FSDP gathers between the blocks
        for block in model.blocks:
            block.compile()
    network = torch.compile(model) if compiled == "model" and not ranks.sharded else model
    if ranks.world > 1 and not ranks.sharded:
        device = [ranks.device] if ranks.on_gpu else None
        network = DistributedDataParallel(network, device_ids=device, gradient_as_bucket_view=True)
    network.forward = autocast(config.dtype, ranks.device)(network.forward)
    return network
