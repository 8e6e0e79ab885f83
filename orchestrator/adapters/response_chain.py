"""A conversation that the provider kept and has forgotten (the Responses API), put together again from the log.

A request of that API names the response that it continues. After a rewind it names an older one, which the provider may
not hold any more. The log holds every input and every output of the chain.
"""

from __future__ import annotations

import json
from typing import Any

from orchestrator.events import ModelCallEvent, RewindEvent
from orchestrator.recorded_call import MESSAGES
from orchestrator.recording.execution import Execution

API = "openai.responses."


def rebuilt_input(execution: Execution, response_id: str) -> list[Any] | None:
    """All items up to and with the response of that id, memories of rewinds in their places.

    ``None``: the log does not hold the whole chain.
    """
    path = execution.session.journal.path()
    calls: dict[str, tuple[ModelCallEvent, dict[str, Any]]] = {}
    for event in path:
        if isinstance(event, ModelCallEvent) and (body := _response(execution, event)) is not None:
            calls[body["id"]] = event, body
    chain: set[int] = set()
    wanted: str | None = response_id
    while wanted is not None:
        if wanted not in calls:
            return None
        answer, _ = calls[wanted]
        chain.add(answer.seq)
        wanted = answer.parameters.get("previous_response_id")
    items: list[Any] = []
    bodies = {answer.seq: body for answer, body in calls.values()}
    told: list[Any] = []
    for event in path:
        if isinstance(event, RewindEvent) and items:
            told += event.messages
        elif event.seq in chain and isinstance(event, ModelCallEvent) and event.call is not None:
            items += [*execution.input_of(event.call.number)[MESSAGES], *told, *map(_item, bodies[event.seq]["output"])]
            told = []
    return [item for item in items if item is not None]


def _response(execution: Execution, event: ModelCallEvent) -> dict[str, Any] | None:
    """The body of a recorded response; of a stream, as its last event has it."""
    if event.call is None or not event.call.api.startswith(API):
        return None
    http = execution.taken_back(event.response).get("http")
    if http is None:
        return None
    for line in reversed(str(http["body"]).splitlines()):
        try:
            found = json.loads(line.removeprefix("data:").strip() if line.startswith("data:") else http["body"])
        except ValueError:
            continue
        body = found.get("response", found) if isinstance(found, dict) else {}
        if isinstance(body.get("output"), list) and body.get("id"):
            return dict(body)
    return None


def _item(item: dict[str, Any]) -> dict[str, Any] | None:
    """An output as an input: without what names the provider's own copy of it."""
    if item.get("type") == "reasoning" and not item.get("encrypted_content"):
        return None
    return {key: value for key, value in item.items() if key not in ("id", "status") and value is not None}
