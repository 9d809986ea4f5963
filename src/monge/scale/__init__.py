"""Many machines on engines that exist: Ray Serve, Ray Data, torchrun."""
