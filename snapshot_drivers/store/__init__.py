"""Where snapshots are kept: packs of content-addressed objects, and manifests that name them."""
