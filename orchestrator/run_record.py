"""``run.json``: what is needed to name a run and to make its container again."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from orchestrator.container_config import ContainerConfig

RECORD_VERSION = 1


class RunRecord(BaseModel):
    """One run, as its launch set it up."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    v: int = RECORD_VERSION
    run_id: str
    created_at: str
    """ISO 8601, UTC."""
    orchestrator_version: str
    task_name: str
    driver: str
    source_dir: str
    """Directory of the task file: relative paths of the task start there."""
    container: ContainerConfig
