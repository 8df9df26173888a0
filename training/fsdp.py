"""FSDP: parameters, gradients and moments spread over the ranks, and whole tensors copied to and from them.

A spread tensor is a DTensor: each rank has some of its rows. Its modules are imported when they are needed, because
that takes half a second.
"""

import torch
import torch.distributed as dist


def shard(model, dtype):
    """Spread the parameters of a GPT over all ranks, in place; each block is gathered when it computes.

    dtype: torch.dtype of the gathered parameters. Shards, sums of gradients and moments are float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # the inputs of a block stay as they are, because the angles of rotary positions need float32
    precision = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(model.embed.weight.device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)


def local(tensors):
    """This rank's rows of spread tensors, a list; other tensors as they are."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def gather(tensor):
    """The whole tensor, on each rank; all ranks must call this for the same tensors in the same order."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def spread_like(parameter, whole):
    """A whole tensor, which all ranks have, on the parameter's device; spread if the parameter is and has its shape."""
    whole = whole.to(parameter.device, copy=True)  # a checkpoint is mapped into memory, and its file may be deleted
    if not hasattr(parameter, "placements") or parameter.shape != whole.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def on_whole_matrices(function, rows, parameter):
    """A function of whole matrices [n, height, width], for matrices that are spread like a parameter.

    Every rank gathers and computes all of them, and keeps its own rows [n, rows of this rank, width] of the results.
    """
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh, placements, shape = parameter.device_mesh, [Shard(1)], torch.Size([len(rows), *parameter.shape])
    stride = (shape[1] * shape[2], shape[2], 1)
    whole = DTensor.from_local(rows, mesh, placements, shape=shape, stride=stride).full_tensor()
    return distribute_tensor(function(whole), mesh, placements, src_data_rank=None).to_local()
