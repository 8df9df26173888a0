"""CUDA graphs: kernels recorded once start without the host, which a small network waits for most of a step."""

import torch

WARM_UPS = 3  # calls before the recording: what compiles, allocates or chooses an algorithm does so in them


class Recorded:
    """A function of tensors that is replayed as a CUDA graph from its fourth call on.

    The function returns tensors, which the next call overwrites. What else it reads or changes (weights, moments, a
    learning rate) must be tensors that stay where they are; it may not wait for the device. Random numbers go on from
    call to call as they would without the graph, and follow torch.manual_seed().
    """

    def __init__(self, function):
        self.function = function
        self.calls = 0
        self.stream = None  # of warm-ups and recording: autograd and the allocator remember streams
        self.graph = None

    def __call__(self, *inputs):
        if self.calls < WARM_UPS:
            self.calls += 1
            return self._warm_up(*inputs)
        if self.graph is None:
            self.inputs = [x.clone() for x in inputs]
            graph = torch.cuda.CUDAGraph()
            # other threads, which save a checkpoint say, may use the device meanwhile
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.results = self.function(*self.inputs)
            self.graph = graph
        for mine, x in zip(self.inputs, inputs, strict=True):
            if mine.shape != x.shape:
                raise ValueError(f"an input has shape {list(x.shape)}; it was recorded with {list(mine.shape)}")
            mine.copy_(x)
        self.graph.replay()
        return self.results

    def _warm_up(self, *inputs):
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            results = self.function(*inputs)
        torch.cuda.current_stream().wait_stream(self.stream)
        return results
