"""Command lines: flags for a dataclass of options, nanoGPT's names, --help."""

import inspect
import io
import re
import sys
from contextlib import redirect_stderr
from dataclasses import MISSING, fields
from decimal import Decimal
from typing import Annotated, Literal, get_args, get_origin

import tyro

from errors import UserError, fold, perhaps, quote, require

# nanoGPT's option, or option=value: ours
NANOGPT = {
    "dataset": "--data, or --data text --input FILE for a text of your own",
    "out_dir": "--name NAME in train.py; the other scripts take a run as their first argument",
    "init_from=resume": "--resume in train.py; the other scripts take a run as their first argument",
    "init_from=scratch": "the default; leave it out",
    "init_from": "the first argument, such as gpt2",  # of sample.py; train.py has an option of this name
    "eval_only": "python evaluate.py",
    "start": "--prompt",
    "max_new_tokens": "--max_tokens",
    "max_iters": "--steps",
    "lr_decay_iters": "--steps",
    "warmup_iters": "--warmup_steps",
    "min_lr": "--min_learning_rate",
    "decay_lr": "--min_learning_rate; as high as --learning_rate it makes the rate constant",
    "eval_interval": "--eval_every",
    "eval_iters": "--eval_batches",
    "log_interval": "--log_every",
    "always_save_checkpoint": "--save_every",
    "gradient_accumulation_steps": "--batch_size, which counts all micro-batches, with --micro_batch",
    "wandb_log": "--wandb online",
    "wandb_project": "the environment variable WANDB_PROJECT",
    "wandb_run_name": "--name",
    "compile=True": "--compile model",
    "compile=False": "--compile off",
}


UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# a comment between the options of a class, which is a heading, or an option with its docstring
OPTION = re.compile(r'^    (?:# (.+)|(\w+): .+(?:\n    """((?s:.+?))""")?)$', re.MULTILINE)


def parse_flags(kind, argv, settings=None):
    """An instance of the dataclass `kind` from `--name value` flags; of a repeated flag the last one counts.

    A flag of a boolean option may stand alone and then means True.
    settings: values that flags override, by name; --help prints them, and ends the process.

    Raises:
        UserError: an option does not exist, or a value is missing or of another type.
    """
    settings, names, argv = settings or {}, {field.name: field.type for field in fields(kind)}, list(argv)
    typed = {}
    if "--help" in argv or "-h" in argv:
        print_help(kind, settings)
        sys.exit()
    for index in reversed(range(len(argv))):
        flag, given, value = argv[index].partition("=")
        if not re.match("--[A-Za-z]", flag):
            continue
        name = flag[2:].replace("-", "_")
        alone = not given and (index + 1 == len(argv) or re.match("--?[A-Za-z]", argv[index + 1]))
        value = value if given or alone else argv[index + 1]
        refuse_nanogpt(name, value, names)
        if name not in names:
            initials = {"".join(word[:1] for word in each.split("_")): each for each in names}  # lr
            begun = next((each for each in names if each.startswith(name)), name)  # temp
            similar = perhaps(initials.get(name, begun), names, "--")
            raise UserError(f"there is no option {flag}{similar}; --help lists all")
        option = names[name]
        if option is bool and not given and value.lower() not in ("true", "false", "yes", "no"):
            argv.insert(index + 1, "True")
            continue
        if alone:
            raise UserError(f"{flag} needs a value: {in_words(option)}")
        if int in (option, *get_args(option)) and (number := count_of(value)) is not None:
            value = str(number)
            argv[index : index + 2 - bool(given)] = [f"{flag}={value}"]
        typed.setdefault(name, value)  # the last one, since they are read in reverse
    options = dict(default=kind(**settings)) if settings else {}
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            return tyro.cli(kind, args=argv, use_underscores=True, config=(tyro.conf.FlagConversionOff,), **options)
    except SystemExit:  # after a box with a title, the mistake and how to get help
        printed = " ".join(re.sub("[│╭╮╰╯─]", "", printed.getvalue()).split()).partition(" For full helptext")[0]
    _, found, ours = printed.partition(f"Error parsing {kind.__name__}: ")  # which __post_init__ has raised
    require(not found, ours)
    usage = f"type {inspect.cleandoc(kind.__doc__).splitlines()[0]}"
    _, found, arguments = printed.partition("Unrecognized options: ")
    require(not found, f"{arguments} is one argument too many; {usage}")
    require("Missing" not in printed, f"an argument is missing; {usage}")
    name = re.search(r"--(\w+)", printed)[1]
    raise UserError(f"--{name} {quote(typed[name])} must be {in_words(names[name])}")


def count_of(text):
    """The whole number in a text such as 4096, 1e3, 43M or 1.5B; None if there is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:E\d+)?)([KMBT]?)", text.upper())
    number = Decimal(found[1]) * UNITS[found[2]] if found else Decimal("NaN")
    return int(number) if number == number.to_integral_value() else None


def refuse_nanogpt(name, value, names):
    """UserError for an option of nanoGPT that is none of the options `names`."""
    ours = NANOGPT.get(f"{name}={value}") or (name not in names and NANOGPT.get(name))
    require(not ours, f"{name} is a name of nanoGPT; here it is {ours}")


def print_help(kind, settings):
    """Print the options of a dataclass by subject, with their values: those of settings, else the defaults."""
    options = {field.name: field for field in fields(kind)}
    usage = f"usage: {inspect.cleandoc(kind.__doc__)}\n\nIn brackets: the value unless you give another."
    print(*map(fold, usage.splitlines()), sep="\n")
    for owner in kind.__mro__[:-1]:
        for heading, name, text in OPTION.findall(inspect.getsource(owner)):
            if heading:
                print(f"\n{heading}")
            if name not in options:
                continue
            option, value = options[name].type, settings.get(name, options[name].default)
            typed = name.upper() if get_origin(option) is Annotated else f"--{name} {values_of(option)}"
            hidden = value in ((), MISSING) or not str(value).strip()  # "" or a line break
            shown = "" if hidden else f"  [{value if str(value).isprintable() else repr(value)}]"
            print(f"  {typed}{shown}", *([fold(" " * 6 + " ".join(text.split()), 6)] if text else []), sep="\n")


def in_words(kind):
    """How a sentence names the values of an option, such as: a whole number or auto."""
    text = values_of(kind).replace("|None", "").replace("|", " or ").replace(",", " or ")
    for name, words in (("INT", "a whole number"), ("FLOAT", "a number"), ("STR", "a text")):
        text = text.replace(name, words)
    return re.sub("[{}]", "", text)


def values_of(kind):
    """How a value is typed, such as INT|{auto}."""
    if kind is bool:
        return "{True,False}"
    if get_origin(kind) is Literal:
        return f"{{{','.join(get_args(kind))}}}"
    if get_origin(kind) is tuple:
        return f"{values_of(get_args(kind)[0])} ..."
    return "|".join(map(values_of, get_args(kind))) or ("None" if kind is type(None) else kind.__name__.upper())
