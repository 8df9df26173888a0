"""Prompt -> text."""

from generation.choose import Sampling
from generation.generate import Generator, generate, generate_batch

__all__ = ["Generator", "Sampling", "generate", "generate_batch"]
