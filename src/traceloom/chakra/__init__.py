"""The MLCommons Chakra execution trace format: schema, codec, validation, targets."""
