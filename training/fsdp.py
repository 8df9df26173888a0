"""FSDP: parameters, gradients and moments spread over the ranks, and whole tensors copied to and from them.

A spread tensor is a DTensor: each rank has some of its rows. Importing that class takes a second, so it is recognised
by an attribute.
"""

import math
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F


def shard(model, dtype, cpu_offload, kind):
    """Spread the parameters of a GPT over all ranks, in place; each block is gathered when it computes.

    Args:
        dtype: torch.dtype of the gathered parameters. Shards, sums of gradients and moments are float32.
        cpu_offload: keep the shards in host memory. kind: of the device that computes, "cuda" or "cpu".
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    # the inputs of a block stay as they are, because the angles of rotary positions need float32
    precision = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options = dict(mesh=init_device_mesh(kind, (dist.get_world_size(),)), mp_policy=precision)
    if cpu_offload and kind == "cuda":
        options["offload_policy"] = CPUOffloadPolicy()
    # FSDP's hooks would be lost if the values that the first block returns were changed in place, which nothing does
    warnings.filterwarnings("ignore", ".*returned a view tensor", UserWarning)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def is_spread(tensor):
    return hasattr(tensor, "device_mesh")


def local(tensor):
    """This rank's rows of a spread tensor; another tensor as it is."""
    return tensor.to_local() if is_spread(tensor) else tensor


def put(parameter, whole):
    """Copy a whole tensor, which all ranks have, into a parameter."""
    if is_spread(parameter):
        from torch.distributed.tensor import distribute_tensor

        mesh = parameter.device_mesh
        whole = distribute_tensor(whole.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)


def from_rank_0(whole, parameter, ranks):
    """Rank 0's tensor (on "meta" elsewhere), on all ranks; spread like `parameter` if that is and has its shape."""
    value = torch.empty_like(whole, device=ranks.device)
    if ranks.rank == 0:
        value.copy_(whole)
    if is_spread(parameter) and parameter.shape == value.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, parameter.device_mesh, parameter.placements).to(parameter.device)
    if ranks.world > 1:
        dist.broadcast(value, 0)
    return value


def gather(value):
    """The whole tensor, on each rank; all ranks must call this for the same tensors in the same order."""
    return value.to(value.device_mesh.device_type).full_tensor() if is_spread(value) else value


def on_whole(function, rows, parameter):
    """A function of whole matrices, for matrices that are spread like a parameter; each rank computes some of them.

    Args:
        function: [m, height, width] -> the same shape. On a GPU it is given bfloat16.
        rows: [n, rows of this rank, width].

    Returns:
        The rows of this rank of the n results, with the dtype and on the device of `rows`.
    """
    mesh, (n, here, width) = parameter.device_mesh, rows.shape
    height, world = parameter.shape[0], mesh.size()
    most, each = math.ceil(height / world), math.ceil(n / world)  # rows of a rank, as DTensor cuts; matrices of a rank
    heights = [max(0, min(most, height - rank * most)) for rank in range(world)]
    sent, received = [each * here * width] * world, [each * count * width for count in heights]

    def exchange(x, output, inputs):
        out = x.new_empty(sum(output))
        dist.all_to_all_single(out, x.flatten(), output, inputs, group=mesh.get_group())
        return out

    x = rows.to(mesh.device_type)
    x = F.pad(x.bfloat16() if x.is_cuda else x, (0, 0, 0, 0, 0, each * world - n))
    pieces = exchange(x, received, sent).split(received)
    whole = torch.cat([piece.view(each, -1, width) for piece in pieces if len(piece)], dim=1)
    results = function(whole).split(heights, dim=1)
    back = exchange(torch.cat([result.flatten() for result in results]), sent, received)
    return back.view(each * world, here, width)[:n].to(rows)
