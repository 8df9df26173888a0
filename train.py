"""Train a GPT.

    python train.py configs/shakespeare.py [--learning_rate 3e-4 ...]     one process, on a GPU or a CPU
    python train.py --resume                                              resume the newest run
    torchrun --nproc_per_node=4 train.py configs/gpt2.py                  several GPUs of a host

A run writes runs/NAME/: config.json, metrics.jsonl, checkpoint.pt, best.pt and loss.png. Ctrl-C, SIGTERM and a closed
terminal save and stop; SIGUSR1 saves and goes on.
"""

import os
import sys
from contextlib import closing
from functools import partial

import torch

from data import Batches, validation_batches
from generation import Generator
from training.checkpoint import Run, checkpoints, load_on_rank_0
from training.config import load_config
from training.distributed import STOP, Signals, end_distributed, fail, lost_a_rank, open_on_all_ranks, start_distributed
from training.network import compile_and_wrap, make_model
from training.optimizer import averaged, learning_rate, make_optimizer
from training.report import Report
from training.start import KernelsAhead, StartClock, compile_network
from training.step import TrainStep, choose_micro_batch, eagerly, evaluate, prefetch
from training.weights import load_pretrained

SAMPLE_PROMPT, SAMPLE_TOKENS = 16, 100  # of --sample_every


def train(config):
    """One run; returns the best validation loss in nats per token."""
    clock = StartClock()
    ranks = start_distributed(config)
    config = ranks.share(config)  # with --resume alone, ranks may have found different runs
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it
        torch.use_deterministic_algorithms(True)
    if ranks.on_gpu:
        torch.set_float32_matmul_precision("high")  # TF32 where float32 remains

    saved = load_on_rank_0(checkpoints(config.resume), ranks) if config.resume else {}
    corpus = open_on_all_ranks(config, ranks, saved.get("tokens_sha256"))
    batches = Batches(corpus.train, config.block_size, config.batch_size, config.seed)
    clock.end("data")

    model, ranks = make_model(config, corpus.tokenizer, ranks)
    if config.init_from and not saved:
        load_pretrained(model, config.init_from, corpus.tokenizer, ranks)
    optimizer = make_optimizer(model, config, ranks)
    micro_batch = choose_micro_batch(model, config, ranks, saved.get("take_step", {}).get("micro_batch"))
    # evaluate the same tokens for any micro-batch
    eval_batches = config.eval_batches * (config.batch_size // micro_batch) or None
    validation = validation_batches(corpus.val, config.block_size, micro_batch, eval_batches)

    run = Run(config, corpus, ranks, saved)
    network = compile_and_wrap(model, config, ranks)
    take_step = TrainStep(network, optimizer, config, ranks, micro_batch)
    start, best = run.load(model, optimizer, take_step)  # 0 and infinity for a new run
    report = Report(run.folder, config, model, corpus, ranks, start)
    with KernelsAhead(model.config, config, ranks, micro_batch):
        report.describe(model, corpus, ranks, micro_batch)
        clock.end("model")
        compile_network(network, config, ranks, micro_batch)
    clock.end("compilation")

    steps = prefetch(batches, range(start, config.steps), ranks)
    with Signals(ranks) as signals, closing(steps):
        for step in range(start, config.steps + 1):
            asked = signals.agreed()
            last = step == config.steps
            due = last or step % config.eval_every == 0
            save = last or asked or step % (config.save_every or config.eval_every) == 0
            if (due or save) and (step > start or step == 0):
                take_step.check_bad_steps(step, batches, run.folder)
                with report.pause():
                    is_best = False
                    if due:
                        with averaged(optimizer):
                            loss = evaluate(model, validation, config, ranks)
                        is_best = 0 < step and loss < best
                        best = loss if is_best else best
                        report.evaluation(step, loss, is_best)
                    if step > 0 and (save or is_best):
                        run.save(step, best, is_best, model, optimizer, take_step, newest=save)
            if asked == STOP or last:
                break  # after config.steps updates and one last evaluation

            if step == start:
                clock.end("evaluation")
            rate = learning_rate(step, config)
            loss, grad_norm = take_step(step, *next(steps), rate)
            if step == start:
                loss.item()  # waits for the device
                clock.end("first step")
                report.start(clock.parts)
            if (step + 1) % config.log_every == 0:
                report.step(step + 1, rate, loss, grad_norm, take_step.skipped)
                take_step.check_bad_steps(step + 1, batches, run.folder)
            if config.sample_every and (step + 1) % config.sample_every == 0:
                take_step.check_bad_steps(step + 1, batches, run.folder)  # waits for the steps before the sample
                with averaged(optimizer):
                    report.sample(step + 1, partial(write_sample, model, corpus, config))
        run.close()
    report.close(step, best)
    return best


def write_sample(model, corpus, config):
    """The start of the validation text, continued by the current model; torch's random state does not change."""
    prompt = corpus.val.windows([0], min(SAMPLE_PROMPT, config.block_size))[0].tolist()
    model.eval()
    try:
        generator = Generator(model, corpus.tokenizer, seed=config.seed, graph=False)
        with eagerly():  # the model is compiled for the shapes of training only
            tokens = [token for [token] in generator.tokens([prompt], SAMPLE_TOKENS)]
    finally:
        model.train()
    return corpus.tokenizer.decode(prompt + tokens)


def main(argv):
    try:
        train(load_config(argv))
    except (ValueError, OSError) as error:
        fail(error)
    except torch.OutOfMemoryError as error:
        fail(f"{str(error).split('. ')[0]}; give a smaller --micro_batch, or --checkpoint_activations blocks")
    except RuntimeError as error:
        if not lost_a_rank(error):
            raise
        fail(f"another rank has ended and prints why ({str(error).splitlines()[0]})")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        end_distributed()


if __name__ == "__main__":
    main(sys.argv[1:])
