"""A LangChain agent: two lines more than without the recorder, the import and the middleware."""

import os

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

from orchestrator import RecordedRun
from orchestrator.adapters.langchain import middleware

MODEL = os.environ.get("EXAMPLE_MODEL", "gpt-5-mini")


async def agent(run: RecordedRun) -> None:
    """Work on the task until the model calls no more tools. It is called again after a rewind."""
    working = create_agent(ChatOpenAI(model=MODEL), [], middleware=[middleware(run)])
    await working.ainvoke({"messages": [("user", run.instruction)]}, {"recursion_limit": 1000})
