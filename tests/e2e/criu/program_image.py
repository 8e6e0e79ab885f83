"""The image of programs from the distribution, made once for each list of packages."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import docker
import pytest

REPOSITORY = "orchestrator-programs"
_LABEL = "orchestrator.programs"
_SCRIPT = """
printf '#!/bin/sh\\nexit 101\\n' > /usr/sbin/policy-rc.d
chmod +x /usr/sbin/policy-rc.d
apt-get -q -o Acquire::Retries=3 update
DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends "$@"
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /var/lib/mysql
"""
_LIMIT_S = 300


def program_image(base: str, packages: Sequence[str]) -> str:
    """Name of an image with the packages on ``base``; skips the test where the mirror cannot be reached."""
    client = docker.from_env(timeout=_LIMIT_S)
    try:
        origin = client.images.get(base).id
        digest = hashlib.sha256(" ".join([origin, _SCRIPT, *packages]).encode()).hexdigest()[:12]
        name = f"{REPOSITORY}:{digest}"
        if client.images.list(name):
            return name
        maker = client.containers.run(
            base,
            entrypoint=["sh", "-ec", _SCRIPT, "sh", *packages],
            name=f"orchestrator-programs-{secrets.token_hex(3)}",
            labels={_LABEL: digest},
            detach=True,
        )
        try:
            if maker.wait(timeout=_LIMIT_S)["StatusCode"]:
                said = maker.logs(tail=5).decode(errors="replace")
                pytest.skip(f"the packages cannot be installed from a container: {said}")
            maker.commit(REPOSITORY, digest, changes=["ENTRYPOINT []", 'CMD ["bash"]'])
        finally:
            maker.remove(force=True)
        return name
    finally:
        client.close()
