"""One sample's graph, drawn as text, DOT, Mermaid or JSON."""
