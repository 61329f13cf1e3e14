"""Everything that touches somebody else's quantizer or a device: backends and exporters."""
