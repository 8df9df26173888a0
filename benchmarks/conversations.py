"""Questions and answers from the documentation of installed packages, as conversations for configs/chat.py.

    python benchmarks/conversations.py conversations.jsonl --seed 1

Each documented function, class or method of the standard library, NumPy and PyTorch gives one conversation: what it
does and, in many of them, its signature. The same packages and seed give the same file.
"""

import argparse
import importlib
import inspect
import json
import random
import re
import sys
import warnings

SIDE_EFFECTS = ("antigravity", "this", "idlelib", "tkinter", "turtle", "turtledemo", "_", "lib2to3", "test")
OTHERS = (
    "numpy", "numpy.linalg", "numpy.fft", "numpy.random", "numpy.ma", "numpy.polynomial", "numpy.testing", "torch",
    "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.optim", "torch.optim.lr_scheduler", "torch.linalg",
    "torch.fft", "torch.special", "torch.distributions", "torch.utils.data", "torch.autograd", "torch.cuda",
)  # fmt: skip
MARKUP = re.compile(r":\w+:`~?\.?([^`<]+?)(?: <[^>]*>)?`|``?([^`]+)``?")
QUESTIONS = ("What does {} do?", "What is {} for?", "Explain {}.", "Tell me about {}.", "Describe {} in a few words.")
SYSTEM = "You answer questions about Python and its packages."
THEN = ("What is its signature?", "How do I call it?", "Which arguments does it take?")


def documented():
    """{name: object} of what modules define in public, without aliases."""
    found, seen = {}, set()
    for module in [*sorted(sys.stdlib_module_names), *OTHERS]:
        if module.startswith(SIDE_EFFECTS):
            continue
        try:
            members = list(vars(importlib.import_module(module)).items())
        except Exception:  # a module of another system
            continue
        package = module.partition(".")[0]
        for name, value in list(members):
            if inspect.isclass(value) and str(value.__module__).startswith(package):
                members += [(f"{name}.{inner}", item) for inner, item in vars(value).items()]
        for name, item in members:
            public = not any(part.startswith("_") for part in name.split("."))
            if public and callable(item) and isinstance(doc := item.__doc__, str) and doc not in seen:
                seen.add(doc)
                found[f"{module}.{name}"] = item
    return found


def conversation(name, item, draw):
    """The messages about an object, or None if its documentation begins with no sentence of a good length."""
    paragraphs = [" ".join(text.split()) for text in inspect.getdoc(item).split("\n\n")]
    prose = [text for text in paragraphs if not re.match(r"[\w.]+\(.*\)", text)]
    answer = MARKUP.sub(lambda found: found[1] or found[2], prose[0]) if prose else ""
    if not (20 <= len(answer) <= 500 and answer[0].isupper() and answer[-1] == "."):
        return None
    turns = [("system", SYSTEM)] if draw.random() < 0.3 else []
    turns += [("user", draw.choice(QUESTIONS).format(name)), ("assistant", answer)]
    try:
        signature = f"{name}{inspect.signature(item)}"
    except (TypeError, ValueError):  # of a function in C
        signature = name.rpartition(".")[0] + "." + paragraphs[0] if paragraphs[0] not in prose else ""
    if 0 < len(signature) <= 200 and " at 0x" not in signature and draw.random() < 0.7:
        turns += [("user", draw.choice(THEN)), ("assistant", signature)]
    return [dict(role=role, content=text) for role, text in turns]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of names that packages no longer want to be used
    found = ((name, conversation(name, x, random.Random(f"{options.seed} {name}"))) for name, x in documented().items())
    lines = [json.dumps({"messages": messages}) for _, messages in sorted(found) if messages]
    with open(options.file, "w") as file:
        file.write("\n".join(lines) + "\n")
    print(f"{len(lines):,} conversations in {options.file}")
