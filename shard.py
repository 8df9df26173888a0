"""--shard_optimizer: an optimizer whose state is spread over the ranks (Rajbhandari et al. 2020, ZeRO, stage 1)."""

import torch
import torch.distributed as dist

ADAMW, MUON = ("exp_avg", "exp_avg_sq", "step"), ("momentum",)  # names of the state of one parameter


class Sharded:
    """Each rank takes the step of its share of the parameters, whose moments no other holds; then all get all of them.

    What a checkpoint has of it is the state of the optimizer in one piece, so that any number of processes, sharded or
    not, can go on from it. torch's ZeroRedundancyOptimizer gathers pickles, and loads AdamW's step counts to the CPU,
    where a fused AdamW on a GPU does not take them.

    Args:
        make: a function from parameter groups to the AdamW or Muon of a rank. groups: of all parameters, the same on
            all ranks. rank, world: of this process.
    """

    def __init__(self, make, groups, rank, world):
        self.rank = rank
        self.parameters = [p for group in groups for p in group["params"]]  # numbered as in torch's optimizers
        self.names = {p: MUON if "momentum" in group else ADAMW for group in groups for p in group["params"]}
        self.owner, held = {}, [0] * world
        for p in sorted(self.parameters, key=torch.numel, reverse=True):
            self.owner[p] = held.index(min(held))
            held[self.owner[p]] += p.numel()
        self.local = make([g | {"params": [p for p in g["params"] if self.owner[p] == rank]} for g in groups])
        self.param_groups = [
            own | {"params": list(g["params"])} for own, g in zip(self.local.param_groups, groups, strict=True)
        ]
        self.found_inf = None

    def step(self):
        self._tell_local()
        self.local.found_inf = self.found_inf
        self.local.step()
        sent = [dist.broadcast(p.detach(), owner, async_op=True) for p, owner in self.owner.items()]
        for work in sent:
            work.wait()

    def zero_grad(self, set_to_none=True):
        for p in self.parameters:
            p.grad = None

    def state_dict(self):
        """Call it on all ranks: the first gets the whole state, on the CPU, one parameter after the other."""
        state = {}
        for number, p in enumerate(self.parameters):
            if self.owner[p] == self.rank:
                mine = [self.local.state[p][name] for name in self.names[p]]
                if self.rank > 0:
                    for x in mine:
                        dist.send(x, 0)
            elif self.rank == 0:
                mine = [p.new_empty(() if name == "step" else p.shape) for name in self.names[p]]
                for x in mine:
                    dist.recv(x, self.owner[p])
            if self.rank == 0:
                state[number] = {name: x.detach().cpu() for name, x in zip(self.names[p], mine, strict=True)}
        return {"state": state, "param_groups": self._numbered(self.param_groups, self.parameters)}

    def load_state_dict(self, whole):
        """Of the state of an optimizer in one piece, take what this rank holds."""
        own = [p for group in self.local.param_groups for p in group["params"]]
        numbers = {p: number for number, p in enumerate(self.parameters)}
        state = {place: whole["state"][numbers[p]] for place, p in enumerate(own) if numbers[p] in whole["state"]}
        for group, stored in zip(self.param_groups, whole["param_groups"], strict=True):
            group.update({name: value for name, value in stored.items() if name != "params"})
        self._tell_local()
        self.local.load_state_dict({"state": state, "param_groups": self._numbered(self.local.param_groups, own)})

    def _tell_local(self):
        """The options of all groups, such as a new learning rate, to the groups of this rank."""
        for own, group in zip(self.local.param_groups, self.param_groups, strict=True):
            own.update({name: value for name, value in group.items() if name != "params"})

    @staticmethod
    def _numbered(groups, parameters):
        """Groups with numbers for parameters, as in a state_dict()."""
        numbers = {p: number for number, p in enumerate(parameters)}
        return [group | {"params": [numbers[p] for p in group["params"]]} for group in groups]
