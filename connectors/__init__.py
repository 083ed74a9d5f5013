"""Engine connectors, installed as kvtier.connectors."""
