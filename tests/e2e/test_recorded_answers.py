"""Every form of an answer comes back from the log as it came from the provider: real SDKs, a real HTTP endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator import instrument
from orchestrator.errors import Divergence
from orchestrator.litellm_setup import prepare_import
from orchestrator.recording.tool_hook import tool
from tests.e2e import provider_replies as wire
from tests.e2e.provider_server import ProviderServer, Reply, Request, Script
from tests.e2e.test_endpoints import KEY, _keys  # noqa: F401 - a fixture
from tests.unit.recorded_bench import RecordedBench

prepare_import()  # else LiteLLM calls home when it is imported
litellm = pytest.importorskip("litellm")
openai = pytest.importorskip("openai")

DELTAS = [{"role": "assistant", "content": "a"}, {"content": "b"}, {"reasoning_content": "hm"}, {"content": "c"}]
PLAIN = wire.openai({"content": "plain"})
STREAM = wire.openai_stream(DELTAS, usage=wire.OPENAI_USAGE)
NO_USAGE = wire.openai_stream(DELTAS)
PIECE = {"role": "assistant", "tool_calls": [wire.call("t1", '{"command": "ls', index=0)]}
CUT = wire.openai_stream([PIECE, {"content": ""}], None, done=False, framing="close")
BAD = wire.plain({"error": {"message": "no", "type": "t", "code": "c"}}, 400)
FLAKY = wire.plain({"error": {"message": "no", "type": "t", "code": "c"}}, 500, headers={"retry-after-ms": "1"})


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(autouse=True)
def _hooks() -> None:
    instrument("openai", "litellm")


class Twice:
    """A harness driven twice, against the provider and from its log: both saw the same, the second asked nothing."""

    def __init__(self, directory: Path, harness: Callable[[str], Any], *replies: Script) -> None:
        with ProviderServer(*replies) as server:
            self.bench = RecordedBench(directory)
            self.first = self._drive(harness, server.url)
            self.asked = len(server.requests)
            self.bench.reopen()
            assert self._drive(harness, server.url) == self.first
            assert len(server.requests) == self.asked
        self.calls = self.bench.of("model_call")
        assert KEY not in (directory / "events.jsonl").read_text()

    def _drive(self, harness: Callable[[str], Any], url: str) -> Any:
        if asyncio.iscoroutinefunction(harness):
            return asyncio.run(self.bench.run.drive_async(harness, url))
        return self.bench.run.drive(harness, url)

    @property
    def breakpoints(self) -> list[int]:
        return [row.breakpoint_id for row in self.bench.of("checkpoint")]


def openai_forms(url: str) -> list[Any]:
    with openai.OpenAI(base_url=f"{url}/v1") as client:
        ask = client.chat.completions.create
        seen = [ask(messages=user("1"), model="m").model_dump()]
        seen.append([chunk.model_dump() for chunk in ask(messages=user("2"), model="m", stream=True)])
        for chunk in ask(messages=user("3"), model="m", stream=True):
            seen.append(chunk.model_dump())
            break
        return seen


async def openai_forms_async(url: str) -> list[Any]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1") as client:
        ask = client.chat.completions.create
        seen = [(await ask(messages=user("1"), model="m")).model_dump()]
        seen.append([chunk.model_dump() async for chunk in await ask(messages=user("2"), model="m", stream=True)])
        async with await ask(messages=user("3"), model="m", stream=True) as stream:
            async for chunk in stream:
                seen.append(chunk.model_dump())
                break
        return seen


def litellm_forms(url: str) -> list[Any]:
    where = {"model": "openai/m", "api_base": f"{url}/v1"}
    seen = [litellm.completion(messages=user("1"), **where).model_dump()]
    seen.append([chunk.model_dump() for chunk in litellm.completion(messages=user("2"), stream=True, **where)])
    for chunk in litellm.completion(messages=user("3"), stream=True, **where):
        seen.append(chunk.model_dump())
        break
    return seen


async def litellm_forms_async(url: str) -> list[Any]:
    where = {"model": "openai/m", "api_base": f"{url}/v1"}
    seen = [(await litellm.acompletion(messages=user("1"), **where)).model_dump()]
    stream = await litellm.acompletion(messages=user("2"), stream=True, **where)
    seen.append([chunk.model_dump() async for chunk in stream])
    stream = await litellm.acompletion(messages=user("3"), stream=True, **where)
    seen.append((await anext(stream)).model_dump())
    await stream.aclose()
    return seen


@pytest.mark.parametrize("harness", [openai_forms, openai_forms_async, litellm_forms, litellm_forms_async])
def test_plain_streamed_and_left_early_each_is_one_record_and_comes_back_chunk_by_chunk(
    tmp_path: Path, harness: Callable[[str], Any]
) -> None:
    done = Twice(tmp_path, harness, PLAIN, STREAM, STREAM)
    assert [call.call.incomplete for call in done.calls] == [False, False, True]
    # A stream that its caller left is no breakpoint, and nobody knows its tokens.
    assert done.breakpoints == [0, 1] and [call.breakpoint_id for call in done.calls] == [0, 1, -1]
    assert done.calls[0].usage.total_tokens == 18 and done.calls[2].usage is None
    assert done.calls[1].messages[-1]["content"] == "abc" and done.calls[2].messages[-1]["content"] == "a"


def test_tokens_are_what_the_provider_said_or_unknown(tmp_path: Path) -> None:
    done = Twice(tmp_path, openai_forms, PLAIN, NO_USAGE, STREAM)
    assert done.calls[0].usage.total_tokens == 18 and done.calls[1].usage is None


def test_a_stream_that_the_server_cut_is_incomplete_and_its_half_arguments_stand_as_they_came(tmp_path: Path) -> None:
    def harness(url: str) -> list[Any]:
        with openai.OpenAI(base_url=f"{url}/v1") as client:
            stream = client.chat.completions.create(messages=user("1"), model="m", stream=True)
            return [chunk.model_dump() for chunk in stream]

    done = Twice(tmp_path, harness, CUT)
    (call,) = done.calls
    assert call.call.incomplete and call.finish_reason is None and done.breakpoints == []
    assert call.messages[-1]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls'


def test_parsed_raw_and_event_streams_are_made_by_the_sdk_from_the_recorded_bytes(tmp_path: Path) -> None:
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int

    def harness(url: str) -> list[Any]:
        with openai.OpenAI(base_url=f"{url}/v1") as client:
            chat = client.chat.completions
            parsed = chat.parse(messages=user("1"), model="m", response_format=Point).choices[0].message.parsed
            raw = chat.with_raw_response.create(messages=user("2"), model="m")
            with chat.stream(messages=user("3"), model="m") as events:
                return [parsed, raw.status_code, raw.parse().model_dump(), [event.type for event in events]]

    done = Twice(tmp_path, harness, wire.openai({"content": '{"x": 3}'}), PLAIN, STREAM)
    assert done.first[0].x == 3 and len(done.calls) == 3


def test_errors_come_back_as_their_own_type_and_retries_are_one_record(tmp_path: Path) -> None:
    def harness(url: str) -> list[Any]:
        seen: list[Any] = []
        with openai.OpenAI(base_url=f"{url}/v1", max_retries=2) as client:
            try:
                client.chat.completions.create(messages=user("1"), model="m")
            except openai.BadRequestError as error:
                seen.append((str(error), error.status_code, error.body, error.response.status_code))
            seen.append(client.chat.completions.create(messages=user("2"), model="m").model_dump())
        try:
            litellm.completion(model="openai/m", api_base=f"{url}/v1", messages=user("3"), max_retries=0)
        except litellm.BadRequestError as error:
            seen.append((str(error), error.status_code))
        return seen

    done = Twice(tmp_path, harness, BAD, FLAKY, FLAKY, PLAIN, BAD)
    assert len(done.first) == 3 and done.asked == 5
    assert [call.attempts for call in done.calls] == [1, 3, 1]
    assert [next(iter(call.response)) for call in done.calls] == ["raised", "http", "raised"]


def test_nested_hooks_record_one_call_once(tmp_path: Path) -> None:
    pytest.importorskip("langchain_openai")
    instrument("langchain")
    from langchain_openai import ChatOpenAI

    def harness(url: str) -> list[Any]:
        model = ChatOpenAI(model="m", base_url=f"{url}/v1")
        return [model.invoke("1").content, [chunk.content for chunk in model.stream("2")]]

    done = Twice(tmp_path, harness, PLAIN, STREAM)
    assert [call.call.api for call in done.calls] == ["langchain.ChatOpenAI"] * 2
    assert done.breakpoints == [0, 1] and done.calls[1].finish_reason == "stop"


def test_the_anthropic_route_keeps_thinking_and_tool_calls(tmp_path: Path) -> None:
    def harness(url: str) -> list[Any]:
        where = {"model": "anthropic/claude-sonnet-4-5", "api_base": url}
        plain = litellm.completion(messages=user("1"), **where).model_dump()
        return [plain, [chunk.model_dump() for chunk in litellm.completion(messages=user("2"), stream=True, **where)]]

    thinking = {"type": "thinking", "thinking": "hmm", "signature": "s=="}
    stream = wire.anthropic_stream([thinking, wire.tool_use("ls")], "tool_use")
    done = Twice(tmp_path, harness, wire.anthropic([{"type": "text", "text": "x"}]), stream)
    assert done.calls[1].messages[-1]["tool_calls"][0]["function"]["name"] == "bash"


def response(number: int, text: str) -> dict[str, Any]:
    """A body of the Responses API."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    output = [
        {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": content}
    ]
    usage = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    body = {"id": f"resp_{number}", "object": "response", "created_at": 1, "status": "completed", "model": "m"}
    rest = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}, "error": None}
    return {**body, **rest, "output": output, "usage": usage}


def response_stream(number: int, text: str) -> Reply:
    events: list[dict[str, Any]] = [{"type": "response.created", "response": {**response(number, ""), "output": []}}]
    place = {"item_id": f"msg_{number}", "output_index": 0, "content_index": 0, "logprobs": []}
    events += [{"type": "response.output_text.delta", **place, "delta": half} for half in wire.halves(text)]
    events.append({"type": "response.completed", "response": response(number, text)})
    pieces = [
        f"event: {event['type']}\ndata: ".encode() + wire.as_json({**event, "sequence_number": at}) + b"\n\n"
        for at, event in enumerate(events)
    ]
    return wire.stream(pieces)


def chained(url: str) -> list[Any]:
    with openai.OpenAI(base_url=f"{url}/v1") as client:
        first = client.responses.create(model="m", input="one")
        second = client.responses.create(model="m", input="two", previous_response_id=first.id)
        stream = client.responses.create(model="m", input="three", previous_response_id=second.id, stream=True)
        return [first.model_dump(), second.model_dump(), [event.model_dump() for event in stream]]


def test_the_responses_api_goes_back_with_its_ids(tmp_path: Path) -> None:
    replies = [wire.plain(response(1, "eins")), wire.plain(response(2, "zwei")), response_stream(3, "drei")]
    done = Twice(tmp_path, chained, *replies)
    assert [call.usage.total_tokens for call in done.calls] == [7, 7, 7]
    assert [call.messages[-1]["content"] for call in done.calls] == ["eins", "zwei", "drei"]
    assert done.breakpoints == [0, 1, 2]


def test_litellms_responses_come_back_plain_and_streamed(tmp_path: Path) -> None:
    def harness(url: str) -> list[Any]:
        where = {"model": "openai/gpt-4o", "api_base": f"{url}/v1"}  # it streams only for models that it knows
        plain = litellm.responses(input="one", **where)
        stream = litellm.responses(input="two", stream=True, **where)
        return [plain.model_dump(), [event.model_dump() for event in stream]]

    done = Twice(tmp_path, harness, wire.plain(response(1, "eins")), response_stream(2, "zwei"))
    assert [call.messages[-1]["content"] for call in done.calls] == ["eins", "zwei"]
    assert done.breakpoints == [0, 1] and [call.usage.total_tokens for call in done.calls] == [7, 7]


def test_after_a_rewind_the_older_id_is_sent_or_the_whole_conversation_where_it_is_forgotten(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    back = tool(bench.run.backtrack_commit, "back")
    forgotten: set[str] = set()
    passes: list[int] = []

    def reply(request: Request) -> Reply:
        if request.json.get("previous_response_id") in forgotten:
            return wire.plain({"error": {"message": "not found", "type": "t", "code": "c"}}, 404)
        number = len(server.requests)
        return wire.plain(response(number, f"answer {number}"))

    def harness() -> None:
        passes.append(1)
        last = None
        with openai.OpenAI(base_url=f"{server.url}/v1") as client:
            for turn in range(4):
                chained_to = {"previous_response_id": last} if last else {}
                last = client.responses.create(model="m", input=f"turn {turn}", **chained_to).id
        if len(passes) <= 2:
            forgotten.update({"resp_1", "resp_2"} if len(passes) == 2 else ())
            back(2, f"memory {len(passes)}")

    with ProviderServer(reply) as server:
        bench.run.drive(harness)
        sent = [request.json for request in server.requests]
    # Four turns, then twice back to the third: first by its id, then, that being forgotten, in full.
    assert [one.get("previous_response_id") for one in sent[4:6]] == ["resp_2", "resp_5"]
    assert "memory 1" in str(sent[4]["input"][-1]) and sent[4]["input"][0]["content"] == "turn 2"
    assert sent[6]["previous_response_id"] == "resp_2" and "previous_response_id" not in sent[7]
    said = [str(item.get("content")) for item in sent[7]["input"]]
    assert [text for text in said if text.startswith("turn")] == ["turn 0", "turn 1", "turn 2"]
    assert "answer 1" in said[1] and "answer 2" in said[3] and "memory 2" in said[-1] and len(said) == 6
    assert any("does not know resp_2" in note.text for note in bench.of("note"))


def test_a_call_that_was_streamed_is_not_answered_plain(tmp_path: Path) -> None:
    bench = RecordedBench(tmp_path)
    with ProviderServer(STREAM) as server, openai.OpenAI(base_url=f"{server.url}/v1") as client:
        ask = client.chat.completions.create
        bench.run.drive(lambda: [*ask(messages=user("1"), model="m", stream=True)])
        bench.reopen()
        with pytest.raises(Divergence, match=r"parameters\.stream"):
            bench.run.drive(lambda: ask(messages=user("1"), model="m"))
        assert len(server.requests) == 1


def test_a_failure_of_the_recorder_stops_the_harness_whatever_it_catches(tmp_path: Path) -> None:
    from orchestrator.errors import HostError

    bench = RecordedBench(tmp_path)

    def harness(url: str) -> None:
        bench.session.log.close()
        for _ in range(3):
            try:
                litellm.completion(model="openai/m", api_base=f"{url}/v1", messages=user("1"), num_retries=2)
            except Exception:  # noqa: BLE001 - as harnesses do
                continue

    with ProviderServer(PLAIN) as server:
        with pytest.raises(HostError, match="not open for writing"):
            bench.run.drive(harness, server.url)
        assert server.requests == []


def test_a_graph_that_interrupts_itself_in_a_tool_is_interrupted_again(tmp_path: Path) -> None:
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    instrument("langchain")
    from langchain.agents import create_agent
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import Command, interrupt

    ran: list[str] = []

    def ask_a_person(question: str) -> str:
        """Ask."""
        answer = interrupt(question)
        ran.append(answer)
        return f"the person said {answer}"

    def harness(url: str) -> list[Any]:
        model = ChatOpenAI(model="m", base_url=f"{url}/v1")
        tools = [StructuredTool.from_function(ask_a_person)]
        agent = create_agent(model, tools, checkpointer=InMemorySaver())
        thread: Any = {"configurable": {"thread_id": "1"}}
        stopped = agent.invoke({"messages": [("user", "go")]}, thread)
        done = agent.invoke(Command(resume="yes"), thread)
        return [stopped["__interrupt__"][0].value, [message.content for message in done["messages"]]]

    asking = wire.openai({"tool_calls": [wire.call("t1", '{"question": "may I?"}', "ask_a_person")]}, "tool_calls")
    done = Twice(tmp_path, harness, asking, PLAIN)
    assert done.first == ["may I?", ["go", "", "the person said yes", "plain"]] and ran == ["yes"]
    tools = done.bench.of("tool_call")
    assert [next(iter(event.call.outcome)) for event in tools] == ["raised", "returned"]
