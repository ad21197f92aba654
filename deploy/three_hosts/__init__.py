"""FlexMARL on three hosts that are network namespaces of this machine."""
