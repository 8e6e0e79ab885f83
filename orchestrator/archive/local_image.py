"""The image of an unpacked run on this engine: found by its layers or loaded, and where these lie."""

from __future__ import annotations

from orchestrator.archive.head import PackedImage
from orchestrator.archive.image_intake import ImageIntake
from orchestrator.container_config import ContainerConfig, ImageFacts
from orchestrator.engine import HELD_IMAGES, Engine
from orchestrator.engine_images import EngineImages
from orchestrator.errors import HostError
from orchestrator.mounts import layers_hint
from orchestrator.task import BuildSpec, TaskSpec
from snapshot_drivers.errors import EngineError


def local_image(
    wanted: PackedImage, spec: TaskSpec, came: ImageIntake, engine: Engine, images: EngineImages, *, run_id: str
) -> tuple[ImageFacts, bool]:
    """The image is on the engine; whether it had to be loaded. Nothing holds it yet.

    Raises: HostError: it is nowhere: neither on the engine nor in the archive. EngineError.
    """
    references = [wanted.image_id, *([] if isinstance(spec.image, BuildSpec) else [spec.image])]
    for reference in references:
        try:
            facts = engine.image(reference)
        except HostError:
            continue
        if (list(facts.layer_ids), facts.architecture) == (wanted.layer_ids, wanted.architecture):
            return facts, False
    if came.config is None:
        raise HostError(
            f"the archive came without its image, and the engine has none with its layers: load or pull "
            f"{references[-1]} (image {wanted.image_id}, layers {', '.join(wanted.layer_ids)}) first, or pack the run "
            "with its image"
        )
    # Containerd's store has a name of its own for it, and keeps none without a tag.
    tag = None if engine.facts().storage_driver == "overlay2" else f"{HELD_IMAGES}:{run_id}"
    images.load(came.config, came.layers(), wanted.layer_ids, tag)
    return engine.image(tag or came.image_id()), True


def layer_directories(engine: Engine, images: EngineImages, config: ContainerConfig) -> tuple[str, ...]:
    """Where the layers of the container's image lie on the host, topmost first, as a capture would state them.

    With containerd's image store only a container knows: one is made for that, and never started.

    Raises: EngineError.
    """
    if stated := images.layer_directories(config.image.image_id):
        return stated
    request = {"Image": config.image.image_id, "Cmd": ["-"], "Labels": config.labels("scratch")}
    container_id = engine.create(f"{config.name}.layers", request)
    try:
        _, lower = layers_hint(engine, engine.inspect(container_id))
    finally:
        engine.remove(container_id)
    if not lower:
        raise EngineError(f"the engine does not say where the layers of image {config.image.image_id} lie")
    return tuple(str(path) for path in lower[1:])
