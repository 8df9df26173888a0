"""Questions and answers from the documentation of installed packages, as conversations for configs/chat.py.

    python benchmarks/conversations.py FILE.jsonl [SEED]

Each documented function, class or method of the standard library, NumPy and PyTorch gives one conversation: what it
does and, in many of them, its signature. The same packages and seed give the same file.
"""

import importlib
import inspect
import json
import random
import re
import sys
import warnings
from contextlib import suppress

NUMPY = ["numpy"] + [f"numpy.{name}" for name in ("linalg", "fft", "random", "ma", "polynomial", "testing")]
TORCH = ["nn", "nn.functional", "nn.init", "optim", "linalg", "fft", "special", "distributions", "utils.data", "cuda"]
SIDE_EFFECTS = ("antigravity", "this", "idlelib", "tkinter", "turtle", "_", "lib2to3", "test")  # of an import
MARKUP = re.compile(r":\w+:`~?\.?([^`<]+?)(?: <[^>]*>)?`|``?([^`]+)``?")
QUESTIONS = ("What does {} do?", "What is {} for?", "Explain {}.", "Tell me about {}.", "Describe {} in a few words.")
THEN = ("What is its signature?", "How do I call it?", "Which arguments does it take?")
SYSTEM = "You answer questions about Python and its packages."


def documented():
    """Yield (name, object) of what modules define in public, without aliases."""
    seen = set()
    names = [name for name in sorted(sys.stdlib_module_names) if not name.startswith(SIDE_EFFECTS)]
    for module in [*names, *NUMPY, "torch", *(f"torch.{name}" for name in TORCH)]:
        members = []
        with suppress(Exception):  # a module of another system
            members += vars(importlib.import_module(module)).items()
        for name, item in members:
            if inspect.isclass(item) and "." not in name and item.__module__.startswith(module.partition(".")[0]):
                members += [(f"{name}.{inner}", value) for inner, value in vars(item).items()]
            public = callable(item) and not re.search(r"(^|\.)_", name)
            if public and isinstance(doc := item.__doc__, str) and doc not in seen:
                seen.add(doc)
                yield f"{module}.{name}", item


def conversation(name, item, draw):
    """The messages about an object, or None if its documentation begins with no sentence of a good length."""
    first, *rest = (" ".join(text.split()) for text in inspect.getdoc(item).split("\n\n"))
    signature = first if re.match(r"[\w.]+\(.*\)", first) else ""
    answer = MARKUP.sub(lambda found: found[1] or found[2], "".join(rest[:1]) if signature else first)
    if not (20 <= len(answer) <= 500 and answer[0].isupper() and answer[-1] == "."):
        return None
    turns = [("system", SYSTEM)] * (draw.random() < 0.3)
    turns += [("user", draw.choice(QUESTIONS).format(name)), ("assistant", answer)]
    with suppress(TypeError, ValueError, AttributeError):  # of a function in C
        signature = signature or item.__name__ + str(inspect.signature(item))
    if 0 < len(signature) <= 200 and " at 0x" not in signature and draw.random() < 0.7:
        turns += [("user", draw.choice(THEN)), ("assistant", signature)]
    return [dict(role=role, content=text) for role, text in turns]


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of names that packages no longer want to be used
    file, seed = (*sys.argv[1:], "1")[:2]
    found = [conversation(name, item, random.Random(f"{seed} {name}")) for name, item in documented()]
    with open(file, "w") as output:
        output.writelines(json.dumps({"messages": messages}) + "\n" for messages in found if messages)
    print(f"{len(found) - found.count(None):,} conversations in {file}")
