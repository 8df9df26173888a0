"""A conversation with a model, as sample.py --chat holds it."""

from data.chat import require_turns
from errors import require

HELP = """Type what you want to say. Ctrl-C stops an answer; exit or Ctrl-D ends.
/reset begins a new conversation with the same system message, /system TEXT one with another, /system one without."""


class Chat:
    """A history of messages, which each answer continues. generator: Generator with a batch of 1."""

    def __init__(self, generator, max_tokens=500, stop=()):
        require_turns(generator.tokenizer)
        self.generator, self.max_tokens, self.stop, self.messages = generator, max_tokens, stop, []

    def hear(self, line, show):
        """Answer, by show(piece) of each piece; or return False after a command or a blank line.

        If the answer is interrupted, the history keeps what has come of it, or nothing if that is blank.
        """
        command, _, text = line.partition(" ")
        if not line.strip():
            return False
        if line.startswith("/"):
            require(command in ("/reset", "/system"), f"there is no {command}, only /reset and /system TEXT")
            old = [message for message in self.messages if message["role"] == "system"]
            self.messages = old if command == "/reset" else [dict(role="system", content=text)] * bool(text.strip())
            return False
        asked, answer = [*self.messages, dict(role="user", content=line)], ""
        try:
            for _, piece in self.generator.stream([asked], self.max_tokens, self.stop):
                answer += piece
                show(piece)
            show("\n")
        finally:
            if answer.strip():
                self.messages = [*asked, dict(role="assistant", content=answer)]
        return True
