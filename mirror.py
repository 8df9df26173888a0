"""Send a run's metrics.jsonl to wandb, from a process of its own: whatever happens to wandb, training does not notice.

    python mirror.py runs/NAME      all that was recorded, and what follows until standard input ends

train.py starts it for --wandb offline and online. It may be run again by hand: wandb keeps what it already has.
"""

import json
import os
import secrets
import select
import signal
import sys
from pathlib import Path

from say import say

LAST_WORDS = 60  # seconds to end in once the training has


def mirror(folder):
    """Log every record, old and new, under the run's id, which is kept in the folder so that it outlives restarts."""
    import wandb  # here, so that a broken installation is reported like every other failure of wandb

    config = json.loads((folder / "config.json").read_text())
    id_file = folder / "wandb_id"
    if not (id_file.exists() and id_file.read_text()):
        id_file.write_text(secrets.token_hex(4))
    run = wandb.init(
        project=config["wandb_project"], name=folder.name, id=id_file.read_text(), resume="allow", dir=folder,
        mode=config["wandb"] if config["wandb"] != "off" else "online", config=config,
        settings=wandb.Settings(silent=True),
    )  # fmt: skip
    with open(folder / "metrics.jsonl", errors="replace") as file:
        ended, cut = False, ""
        while not ended:
            ended = bool(select.select([sys.stdin], [], [], 1.0)[0])  # nothing is ever written to it
            if ended and hasattr(signal, "alarm"):
                signal.alarm(LAST_WORDS)
            for line in file:
                cut += line
                if cut.endswith("\n"):
                    line, cut = cut, ""
                    try:
                        record = json.loads(line)
                        step = int(record["step"])
                    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
                        # damaged: train.py says so when it resumes
                        continue
                    run.log(record, step=step)
    run.finish()


if __name__ == "__main__":
    try:
        mirror(Path(sys.argv[1]))
    except Exception as error:  # wandb's own errors share no base class
        reason = (str(error) or type(error).__name__).splitlines()[0]
        later = f"python mirror.py {sys.argv[1]} sends its metrics later"
        say(f"wandb: {reason}; the training goes on, and {later}", file=sys.stderr)
        os._exit(1)  # wandb's own end may be a traceback; its service ends with this process
