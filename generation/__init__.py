"""Prompt -> text."""

from generation.chat import Chat
from generation.choose import Sampling
from generation.generate import Generator, generate, generate_batch

__all__ = ["Chat", "Generator", "Sampling", "generate", "generate_batch"]
