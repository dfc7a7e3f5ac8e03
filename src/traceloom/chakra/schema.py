"""The messages of a Chakra execution trace, and the words of its schema.

The messages are defined in `et.proto`, with the field numbers of the MLCommons Chakra schema.
"""

from __future__ import annotations

from traceloom.chakra.et_pb2 import AttributeProto, CollectiveCommType, GlobalMetadata, IOInfo, Node, NodeType, Tensor

__all__ = ["AttributeProto", "CollectiveCommType", "GlobalMetadata", "IOInfo", "Node", "NodeType", "Tensor"]
