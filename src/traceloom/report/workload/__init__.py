"""What a graph or a set of Chakra files is made of: summary, neighbours of a node, a drawing."""
