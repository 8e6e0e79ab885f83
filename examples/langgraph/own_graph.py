"""A graph of two nodes. Every model and every tool in it is recorded, whoever calls it."""

import os

from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from orchestrator import RecordedRun
from orchestrator.adapters.langchain import tools

MODEL = os.environ.get("EXAMPLE_MODEL", "gpt-5-mini")


def graph(run: RecordedRun) -> CompiledStateGraph:
    """Model and tools in turn. Made anew for each pass, so that nothing of an abandoned one is left in it."""
    given = tools(run)
    model = ChatOpenAI(model=MODEL).bind_tools(given)

    def ask(state: MessagesState) -> dict:
        return {"messages": [model.invoke(state["messages"])]}

    made = StateGraph(MessagesState)
    made.add_node("model", ask)
    made.add_node("tools", ToolNode(given))
    made.add_edge(START, "model")
    made.add_conditional_edges("model", tools_condition)
    made.add_edge("tools", "model")
    return made.compile()
