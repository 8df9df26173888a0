"""The network of a run: its first weights, FSDP, activations and micro-batches that fit, compilation, CUDA graph."""

from dataclasses import asdict
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attention import explain
from data.chat import has_turns, with_turns
from data.tokenizer import to_state
from device import WARM_UPS, CUDAGraph, autocast, resolve_dtype
from errors import UserError, require
from kernels.fp8 import convert, require_fp8
from model import GPT
from training.checkpoint import copy_weights
from training.fsdp import shard
from weights import NOT_OF_WEIGHTS, read, require_tokenizer

DDP_WARM_UPS = 11  # DDP measures itself in the first 10 steps, which a graph cannot record
CPU_MICRO_BATCH = 32  # sequences; larger micro-batches gain nothing on a CPU
MEMORY_RESERVE = 0.05  # of a GPU's memory, for compiled code, CUDA graphs and NCCL, which a trial step does not have
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
    with torch.device(ranks.device):
        model = GPT(model_config, config.seed)
    if config.fp8:
        convert(model)
    if ranks.sharded:
        shard(model, dtype)
    if config.checkpoint_activations != "off":
        checkpoint_activations(model, config)
    return model


def load_pretrained(model, name, tokenizer):
    """Copy the weights that --init_from names into a GPT, whose context may be shorter than theirs.

    If only `tokenizer` has the tokens of turns, their rows begin as the mean of the others, and the tables may grow.

    Raises:
        UserError: the network or the tokenizer differs; and as for weights.read().
    """
    found, chat = read(name), has_turns(tokenizer)
    theirs = require_tokenizer(found)
    same = to_state(with_turns(theirs) if chat else theirs) == to_state(tokenizer)
    require(same, f"the corpus has another tokenizer ({tokenizer.name}) than {name}; give --tokenizer run:{name}")
    for option, value in asdict(found.config).items():
        asked = getattr(model.config, option)
        fits = asked == value or option in NOT_OF_WEIGHTS or (option == "block_size" and asked < value)
        fits |= option == "vocab_size" and chat and asked > value
        require(fits, f"{option}={asked} does not fit the weights of {name}, which have {value}; leave {option} out")
    weights = dict(found.weights)
    if model.config.position == "learned":
        weights["embed_position.weight"] = weights["embed_position.weight"][: model.config.block_size]
    for key in ("embed.weight", "head.weight") if tokenizer.n_vocab > theirs.n_vocab else ():
        old, new = weights[key][: theirs.n_vocab], tokenizer.n_vocab - theirs.n_vocab
        weights[key] = torch.cat([old, old.mean(0).expand(new, -1), weights[key][tokenizer.n_vocab :]])
    copy_weights(model, weights)


def check_attention(config, dtype, device):
    """UserError if the implementation that --attention names cannot serve the network of a GPTConfig."""
    if config.attention == "auto":
        return
    options = dict(window=config.window, dropout=config.dropout)
    if config.mask_documents:
        options |= dict(cu_seqlens=torch.zeros(2, dtype=torch.int32, device=device), max_seqlen=config.block_size)
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
        block.forward = lambda x, shared, forward=block.forward: checkpoint(forward, x, shared, **options)


def keep_expensive(context, op, *args, **kwargs):
    """The policy of selective checkpointing: keep what matmuls and attention return."""
    return CheckpointPolicy.MUST_SAVE if str(op).startswith(EXPENSIVE) else CheckpointPolicy.PREFER_RECOMPUTE


def compile_mode(config, ranks):
    """What torch.compile compiles: "model", "blocks" or "off"."""
    if config.compile == "auto":
        return "model" if ranks.on_gpu else "off"
    return config.compile


def choose_micro_batch(model, config, ranks, saved):
    """Sequences per forward pass of one rank: a divisor of the rank's part of the batch.

    saved: the micro-batch of the run that is resumed, or None. It is kept if the option leaves a choice, because
    dropout draws one mask per micro-batch.

    Raises:
        UserError: it cannot be divided, or not even one sequence fits into the GPU's memory.
    """
    count, asked = config.batch_size // ranks.world, config.micro_batch
    size = 1 if asked == "auto" else asked or count
    parts = f"micro_batch={size}" if ranks.world == 1 else f"{ranks.world} processes x micro_batch={size}"
    require(count % size == 0, f"batch_size={config.batch_size} must be a multiple of {parts}; change one")
    if saved and (asked == "auto" or (asked == 0 and config.dropout > 0)):
        if count % saved == 0:
            return saved
        require(
            config.dropout == 0,
            f"the saved micro-batch ({saved}) does not divide this run's {count} sequences per process; take another "
            f"number of processes, or accept other dropout masks: --micro_batch {count} --allow_changes",
        )
    if asked != "auto":
        return size
    divisors = [size for size in range(count, 0, -1) if count % size == 0]
    if not ranks.on_gpu:
        return next(size for size in divisors if size <= CPU_MICRO_BATCH)
    largest = ranks.broadcast(next((size for size in divisors if fits(model, size, config, ranks)), 0))
    remedy = "give --checkpoint_activations blocks, or a smaller network"
    require(largest, f"not even a micro-batch of 1 fits into the GPU's memory; {remedy}")
    return largest


def fits(model, size, config, ranks):
    """Whether a forward and backward pass of `size` sequences fits beside the optimizer's state."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    spare = (2 + (config.ema > 0)) * weights + MEMORY_RESERVE * torch.cuda.mem_get_info(ranks.device)[1]
    try:
        room = torch.empty(int(spare), dtype=torch.uint8, device=ranks.device)
        tokens = torch.zeros(size, config.block_size, dtype=torch.int64, device=ranks.device)
        with autocast(config.dtype, ranks.device):
            loss = model(tokens, tokens)
        loss.backward()
        del room  # held until here
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()  # the next trial may not be able to use blocks of these sizes


def compile_and_wrap(model, config, ranks):
    """The network to train: the model, compiled as config.compile says, in DDP on several ranks."""
    compiled = compile_mode(config, ranks)
    # with dropout, one kernel for both gradients of a norm takes three times as long as two
    options = {"triton.mix_order_reduction": False} if config.dropout > 0 else None
    if compiled == "blocks" or (ranks.sharded and compiled == "model"):  # FSDP gathers between the blocks
        for module in (*model.blocks, model.norm):
            module.compile(options=options)
    network = torch.compile(model, options=options) if compiled == "model" and not ranks.sharded else model
    if ranks.world > 1 and not ranks.sharded:
        device = [ranks.device] if ranks.on_gpu else None
        network = DistributedDataParallel(network, device_ids=device, gradient_as_bucket_view=True)
    return network


def as_graph(take_step, network, optimizer, amp, config, ranks, micro_batch):
    """take_step() as a function of micro-batches, which is replayed as a CUDA graph where that is possible.

    Sums over micro-batches are not recorded, nor is what waits for the device or restores PyTorch's random state.
    """
    step = partial(take_step, network, optimizer, amp=amp, ranks=ranks)
    redraws = config.checkpoint_activations != "off" and config.dropout > 0
    recordable = ranks.on_gpu and not ranks.sharded and not optimizer.scaler.is_enabled() and not redraws
    if not (config.cuda_graph and recordable and micro_batch * ranks.world == config.batch_size):
        return step
    warm_ups = WARM_UPS if ranks.world == 1 else DDP_WARM_UPS
    graph = CUDAGraph(lambda *tensors: step([(*tensors, None, True)]), warm_ups)  # no seed, and it is the last one

    def replay(micro_batches):
        [(inputs, targets, weight, seed, _)] = micro_batches
        if seed is not None:
            torch.manual_seed(seed)
        return graph(inputs, targets, weight)

    return replay
