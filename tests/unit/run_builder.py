"""Makes runs by writing their events through the real context log, with no engine and no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.context_log import ContextLog
from orchestrator.events import (
    CheckpointEvent,
    EndEvent,
    Event,
    ModelCallEvent,
    NoteEvent,
    Progress,
    RestoreEvent,
    RewindEvent,
    RewindIntentEvent,
    RunEvent,
    SubmissionEvent,
    ToolCallEvent,
    Usage,
)
from orchestrator.lineage import find_checkpoint, head, next_breakpoint_id
from snapshot_drivers.base import Change, Coverage, CoverageItem, CoverageState, StateKind

WHOLE = Coverage.of([CoverageItem(kind=StateKind.ROOTFS, path="/", state=CoverageState.CAPTURED)])


class RunBuilder:
    """Appends what a driven run appends, in the order of the alignment rules."""

    def __init__(self, path: Path, run_id: str = "r1", *, manual: bool = False, driver: str = "memory") -> None:
        self.log = ContextLog.open(path, run_id, writer=True)
        self.steps = 0
        if not self.log.events:
            self.add(
                RunEvent(
                    step=0,
                    parent_seq=None,
                    task={"name": "t", "agent": {"kind": "manual" if manual else "function-calling"}},
                    tools=[],
                    driver=driver,
                    container="orchestrator-" + run_id,
                    messages=[{"role": "system", "content": "be good"}, {"role": "user", "content": "fix it"}],
                )
            )

    @property
    def events(self) -> list[Event]:
        return self.log.events

    def head_seq(self) -> int:
        at = head(self.events)
        assert at is not None
        return at.seq

    def add(self, event: Event) -> Event:
        return self.log.append(event)

    def checkpoint(self, kind: str = "model", *, snapshot: bool = True, **fields: Any) -> int:
        """A committed checkpoint at the head; its breakpoint id."""
        number = next_breakpoint_id(self.events)
        snapshot_id = f"s-{number}" if snapshot else None
        values: dict[str, Any] = {
            "step": self.steps,
            "parent_seq": self.head_seq(),
            "before": snapshot_id,
            "after": snapshot_id,
            "breakpoint_id": number,
            "checkpoint_kind": kind,
            "driver": "memory",
            "coverage": WHOLE,
            "progress": None,
        }
        self.add(CheckpointEvent(**(values | fields)))
        return number

    def call(self, text: str = "", *, tools: list[str] | None = None, cost: float | None = 0.01, **fields: Any) -> None:
        """A model call's answer, with tool calls of these names."""
        self.steps += 1
        calls = [
            {"id": f"c{self.steps}-{index}", "type": "function", "function": {"name": name, "arguments": "{}"}}
            for index, name in enumerate(tools or [])
        ]
        answer: dict[str, Any] = {"role": "assistant", "content": text or None}
        if calls:
            answer["tool_calls"] = calls
        values: dict[str, Any] = {
            "step": self.steps,
            "parent_seq": self.head_seq(),
            "messages": [answer],
            "breakpoint_id": next_breakpoint_id(self.events) - 1,
            "model": "scripted/x",
            "parameters": {},
            "request_digest": "0" * 64,
            "request_messages": 1,
            "response": {"choices": [{"message": answer}]},
            "finish_reason": "stop",
            "usage": Usage(prompt_tokens=10, completion_tokens=5, total_tokens=15),
            "cost_usd": cost,
            "latency_ms": 1.0,
            "attempts": 1,
        }
        self.add(ModelCallEvent(**(values | fields)))

    def tool(self, name: str = "bash", *, result: str = "ok", paths: list[str] | None = None, **fields: Any) -> None:
        changes = [Change(status="M", path=path) for path in paths or []]
        values: dict[str, Any] = {
            "step": self.steps,
            "parent_seq": self.head_seq(),
            "messages": [{"role": "tool", "tool_call_id": f"c{self.steps}-0", "content": result}],
            "call_id": f"c{self.steps}-0",
            "name": name,
            "arguments": "{}",
            "result": result,
            "files_changed": changes,
            "files_changed_count": len(changes),
        }
        self.add(ToolCallEvent(**(values | fields)))

    def step(self, text: str = "", *, name: str = "bash", result: str = "ok", paths: list[str] | None = None) -> int:
        """A whole step: checkpoint, model call, one tool call; the breakpoint id."""
        number = self.checkpoint()
        self.call(text, tools=[name])
        self.tool(name, result=result, paths=paths)
        return number

    def submit(self, satisfied: int, total: int = 3, *, failed: str | None = "second") -> None:
        self.add(
            SubmissionEvent(
                step=self.steps,
                parent_seq=self.head_seq(),
                progress=Progress(satisfied=satisfied, total=total),
                failed=failed,
                feedback="no",
                duration_ms=1.0,
            )
        )

    def intent(self, target: int, memory: str | None = "lesson") -> Event:
        self.checkpoint("before_rewind")
        return self.add(
            RewindIntentEvent(step=self.steps, parent_seq=self.head_seq(), breakpoint_id=target, memory=memory)
        )

    def rewind(self, target: int, memory: str = "lesson", *, shown: list[str] | None = None) -> None:
        """A finished rewind; ``shown``: all memories that its message quotes."""
        left = self.head_seq()
        self.intent(target, memory)
        checkpoint = find_checkpoint(self.events, target)
        self.add(
            RewindEvent(
                step=self.steps,
                parent_seq=checkpoint.seq,
                after=checkpoint.after,
                messages=[{"role": "user", "content": "; ".join(shown or [memory])}],
                breakpoint_id=target,
                from_seq=left,
                memory=memory,
                restore_ms=2.0,
                verified="difference",
            )
        )

    def restore(self, target: int) -> None:
        left = self.head_seq()
        self.intent(target, None)
        checkpoint = find_checkpoint(self.events, target)
        self.add(
            RestoreEvent(
                step=self.steps,
                parent_seq=checkpoint.seq,
                after=checkpoint.after,
                breakpoint_id=target,
                from_seq=left,
                container="c2",
                previous_container="c1",
                restore_ms=2.0,
                verified="difference",
            )
        )

    def note(self, text: str, **fields: Any) -> Event:
        values: dict[str, Any] = {"step": self.steps, "parent_seq": self.head_seq(), "text": text}
        return self.add(NoteEvent(**(values | fields)))

    def end(self, status: Any = "succeeded", reason: str | None = "checklist") -> None:
        self.add(EndEvent(step=self.steps, parent_seq=self.head_seq(), status=status, reason=reason))

    def close(self) -> None:
        self.log.close()
