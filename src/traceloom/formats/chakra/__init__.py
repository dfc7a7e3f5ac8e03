"""Reading, writing, decoding and encoding of Chakra files."""
