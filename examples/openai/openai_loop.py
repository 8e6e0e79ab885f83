"""An agent as people write it: ask, run what the model wants, ask again."""

import inspect
import json
import os

import openai

from orchestrator import RecordedRun, tool

MODEL = os.environ.get("EXAMPLE_MODEL", "gpt-5-mini")
TYPES = {str: "string", int: "integer", float: "number"}


def agent(run: RecordedRun) -> None:
    """Work on the task until the model calls no more tools. It is called again after a rewind."""
    functions = [run.bash, run.submit, run.backtrack_candidates, run.backtrack_commit]
    tools = {function.__name__: tool(function) for function in functions}
    messages = [{"role": "user", "content": run.instruction}]
    with openai.OpenAI() as client:
        while True:
            answer = client.chat.completions.create(
                model=MODEL, messages=messages, tools=[schema(function) for function in functions]
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                result = tools[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def schema(function) -> dict:
    """The function as a tool of the API."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    properties = {one.name: {"type": TYPES.get(one.annotation, "number")} for one in parameters}
    required = [one.name for one in parameters if one.default is one.empty]
    described = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": function.__doc__, "parameters": described},
    }
