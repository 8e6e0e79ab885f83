from orchestrator.adapters.instrumentation import instrument as instrument
from orchestrator.recording.opening import recorded_run as recorded_run
from orchestrator.recording.opening import resumed_run as resumed_run
from orchestrator.recording.run import RecordedRun as RecordedRun
from orchestrator.recording.tool_hook import tool as tool

__version__: str
