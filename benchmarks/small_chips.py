"""Train some steps of each config with our kernels as an A100 or an RTX 30 runs them, and with SDPA.

    python benchmarks/small_chips.py 80                        as on an A100: 163 KiB of shared memory
    python benchmarks/small_chips.py 86 --compile blocks       on an RTX 30, 40 or 50: 99 KiB; any options of train.py

It needs a later chip of NVIDIA's, which this process takes for the smaller one. Triton compiles our kernels for that,
ptxas translates them for the chip at hand, and what needs more shared memory than the smaller chip has raises
OutOfResources as it would there. SDPA takes FlashAttention and not cuDNN, which later chips have faster kernels for.
Times are those of the chip at hand, so they compare ours and SDPA only.
"""

import gc
import io
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import DEVICE, FOLDER, ROOT, command_line, synchronize, table

import train
from attention import gpu
from attention import table as settings
from training.checkpoint import Run
from training.config import load_config
from training.ranks import start_ranks

CHIPS = {80: 163, 86: 99}  # compute capability -> KiB of shared memory that one program may use
STEPS = 10  # before the clock starts, and as many are timed
GPT2 = "--init_from= --n_layer 12 --block_size 1024 --vocab_size 50304"
CONFIGS = {  # name in configs/ -> options for which it needs neither its data nor weights, nor much time
    "shakespeare_char": "",
    "shakespeare": "",
    "gpt2": "--batch_size 32",
    "gpt2_books": "",
    "modern": "--tokens 36_000_000 --vocab_size 50304",
    "chat": f"{GPT2} --n_head 12 --n_embd 768",
    "finetune_shakespeare": f"{GPT2} --n_head 25 --n_embd 1600 --batch_size 4",  # a quarter of the layers
}
FIXED = (
    f"--data text --input {ROOT}/data/play.txt --tokenizer bytes+eot --runs {FOLDER.parent} --name {FOLDER.name} "
    "--compile off --eval_every 1000000 --eval_batches 1 --log_every 1000000"
)
clock, failures, training_batches = [], [], train.training_batches


def pretend(chip, limit):
    """Let this process take its GPU for another chip, whose programs may use `limit` bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler.compiler import CompiledKernel

    gpu.chip = settings.chip = lambda device: divmod(chip, 10)
    gpu.shared_memory = lambda device: limit
    driver, load = triton.runtime.driver.active, CompiledKernel.__init__
    target, properties = driver.get_current_target(), driver.utils.get_device_properties
    driver.get_current_target = lambda: GPUTarget("cuda", chip, 32)
    driver.utils.get_device_properties = lambda device: properties(device) | {"max_shared_mem": limit}

    def load_translated(kernel, *args):
        load(kernel, *args)
        if kernel.metadata.target.arch == chip:  # those of torch.compile are for the chip at hand
            with TemporaryDirectory() as folder:
                ptx, cubin = Path(folder, "ptx"), Path(folder, "cubin")
                ptx.write_text(kernel.asm["ptx"])
                ptxas = get_ptxas(target.arch).path
                subprocess.run([ptxas, f"--gpu-name=sm_{target.arch}", ptx, "-o", cubin], check=True)
                kernel.kernel = cubin.read_bytes()

    CompiledKernel.__init__ = load_translated
    torch.backends.cuda.enable_cudnn_sdp(False)


def timed(*arguments):
    """training_batches() of train.py, which ends when enough steps are timed."""
    for number, batch in enumerate(training_batches(*arguments), 1):
        if number % STEPS == 0:
            synchronize()
            clock.append(time.perf_counter())
        if len(clock) == 2:
            return
        yield batch


def time_step(argv):
    """Milliseconds of a step of train.py with these arguments, or what went wrong."""
    clock.clear()
    try:
        with redirect_stdout(io.StringIO()):
            config = load_config(argv)
            ranks = start_ranks(config)
            with Run(config, ranks) as run:
                corpus = run.open_corpus(argv)
                train.train(config.completed(corpus), corpus, run, ranks)
    except StopIteration:  # train() asked timed() for more
        return f"{1000 * (clock[1] - clock[0]) / STEPS:.2f}"
    except Exception as error:  # the other configs are tried too
        failures.append(argv)
        return f"{type(error).__name__}: {error}"[:100]
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def rows(chip, names, options):
    for name in names:
        argv = [f"{ROOT}/configs/{name}.py", *FIXED.split(), *CONFIGS[name].split(), *options]
        yield [name, chip, *(time_step([*argv, f"--attention={impl}"]) for impl in ("triton", "sdpa"))]


def main():
    parser = command_line(__doc__)
    parser.add_argument("chip", type=int, choices=CHIPS, help="compute capability without the dot")
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), choices=CONFIGS)
    args, options = parser.parse_known_args()
    if DEVICE == "cuda":
        pretend(args.chip, CHIPS[args.chip] * 2**10)
    train.training_batches = timed
    table(["config", "as sm", "ours, ms a step", "SDPA"], rows(args.chip, args.configs, options))
    sys.exit(f"error: {len(failures)} runs failed, as the table says" if failures else 0)


if __name__ == "__main__":
    main()
