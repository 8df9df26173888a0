"""A conversation with a model, as sample.py --chat holds it."""

from data.chat import require_turns
from errors import require

HELP = """Type what you want to say. Ctrl-C stops an answer; exit or Ctrl-D ends.
/reset        begin anew, with the same system message
/system TEXT  begin anew with the system message TEXT, or without one"""


class Chat:
    """A history of messages, which each answer continues. generator: Generator with a batch of 1."""

    def __init__(self, generator, max_tokens=500, stop=()):
        require_turns(generator.tokenizer)
        self.generator, self.max_tokens, self.stop, self.messages = generator, max_tokens, stop, []

    def hear(self, line, show):
        """Obey a command or answer; returns whether it was no command. show: a function of each piece of an answer.

        If it is interrupted, the history keeps the answer as far as it came, and nothing of an answer without text.
        """
        command, _, text = line.partition(" ")
        if line.startswith("/"):
            require(command in ("/reset", "/system"), f"there is no {command}, only /reset and /system TEXT")
            old = [message for message in self.messages if message["role"] == "system"]
            new = [dict(role="system", content=text)] if text.strip() else []
            self.messages = old if command == "/reset" else new
            return False
        before, answer = self.messages, ""
        self.messages = [*before, dict(role="user", content=line)]
        try:
            for _, piece in self.generator.stream([self.messages], self.max_tokens, self.stop):
                answer += piece
                show(piece)
        finally:
            heard = answer.strip() != ""
            self.messages = [*self.messages, dict(role="assistant", content=answer)] if heard else before
        return True
