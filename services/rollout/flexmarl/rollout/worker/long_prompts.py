"""Tokens of long prompts are made in a thread: all other samples of the worker go on meanwhile."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from flexmarl.rollout.prompting import Prompt


class LongPrompts:
    """The thread; one, since the cores are the engines'."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="long-prompts")

    async def tokens(self, prompt: Prompt) -> list[int]:
        """The prompt's tokens; waits for those before it, freed when they are made.

        Raises:
            DomainError: As the prompt does.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, prompt.tokens)
